"""The owner's word: what was asked of an agent as events for its mind, and kept on disk.

An agent that dies has promised its owner something, and the next one keeps it.
"""

import getpass
import json
import logging
import time
from pathlib import Path
from typing import Any

import msgspec

from reclaimnet.adapters.linux.boot import boot_id
from reclaimnet.apps.live.clock import Clock
from reclaimnet.apps.notes import write_down
from reclaimnet.engine.provider import Provider
from reclaimnet.errors import Damaged, NotFound, UsageError
from reclaimnet.model import events as ev
from reclaimnet.model.asking import LendRequest, ReclaimRequest, WithdrawRequest
from reclaimnet.model.market import Cause, Gpu, GpuId, NodeId, NoticeId, Offer, Terms

Asked = ev.LendAsked | ev.ReclaimAsked | ev.WithdrawAsked

_log = logging.getLogger("reclaimnet.agent")


class OwnersWord:
    def __init__(self, *, node: NodeId, gpus: tuple[Gpu, ...], file: Path, clock: Clock) -> None:
        self._node = node
        self._gpus = gpus
        self._file = file
        self._clock = clock
        self._requests = 0
        self.unwritten = ""
        """Why the owner's last word is not on disk; empty if it is."""

    def mint(self) -> str:
        """A name for the next thing that is asked."""
        self._requests += 1
        return f"{self._node}-{self._requests}"

    # --- what was asked ----------------------------------------------------------------------

    def asked(
        self, request: LendRequest | ReclaimRequest | WithdrawRequest, provider: Provider
    ) -> Asked:
        """Refused if it names what is not there; whether it is granted is up to the mind."""
        match request:
            case LendRequest():
                return self._lend(request)
            case ReclaimRequest():
                return self._reclaim(request, provider)
            case WithdrawRequest():
                return ev.WithdrawAsked(request=self.mint())

    def _lend(self, request: LendRequest) -> ev.LendAsked:
        gpus = self._gpus
        if request.which:
            chosen = {self._gpu(word) for word in request.which}
            gpus = tuple(gpu for gpu in gpus if gpu.id in chosen)
        count = len(gpus) if request.gpus is None else request.gpus
        if not 0 < count <= len(gpus):
            raise UsageError(f"{self._node} has {len(gpus)} GPUs; it cannot lend {count}")
        if request.notice < 0:
            raise UsageError("a notice cannot be negative; use 0s for none")
        offer = Offer(
            provider=getpass.getuser(),
            gpus=gpus[:count],
            terms=Terms(
                notice=request.notice,
                users=request.users,
                hours=request.hours,
                utc_offset=request.utc_offset,
                maintenance=request.maintenance,
                ends=request.ends,
            ),
        )
        return ev.LendAsked(request=self.mint(), offer=offer)

    def _reclaim(self, request: ReclaimRequest, provider: Provider) -> ev.ReclaimAsked:
        return ev.ReclaimAsked(
            request=self.mint(),
            gpus=tuple(self._gpu(word) for word in request.gpus),
            grace=request.grace,
            reason=request.reason,
            replaces=self._notice_on(request.gpus, provider) if request.change else None,
        )

    def _notice_on(self, words: tuple[str, ...], provider: Provider) -> NoticeId:
        """The one notice that is running, or the one on these GPUs."""
        wanted = {self._gpu(word) for word in words}
        running = [
            notice
            for notice in provider.notices.values()
            if not wanted or wanted & set(notice.gpus)
        ]
        if not running:
            raise NotFound(f"no notice is running on {self._node}, so none can be changed")
        if len(running) > 1:
            raise UsageError("several notices are running; say on which GPU, for example: --gpu 0")
        return running[0].id

    def _gpu(self, word: str) -> GpuId:
        for gpu in self._gpus:
            if word in (str(gpu.index), gpu.id):
                return gpu.id
        known = ", ".join(str(gpu.index) for gpu in self._gpus)
        raise NotFound(f"{self._node} has no GPU {word}; it has {known}")

    # --- what outlives the agent -----------------------------------------------------------

    def keep(self, provider: Provider) -> None:
        """The owner's word is on disk before it is answered. It holds also if that cannot be: it is
        tried again whenever we wake."""
        state = msgspec.to_builtins(
            {
                "boot": boot_id(),
                # What stands is lent again by itself when its hours begin.
                "offer": provider.offer or provider.standing,
                "notices": [
                    {
                        "gpus": n.gpus,
                        "deadline": n.deadline,
                        # The wall may be set before the next agent reads this.
                        "monotonic": self._clock.monotonic(n.deadline),
                        "cause": n.cause,
                        "reason": n.reason,
                    }
                    for n in provider.notices.values()
                ],
            }
        )
        text = json.dumps(state)
        try:
            if not self._file.exists() or self._file.read_text() != text:
                write_down(self._file, text)
            self.unwritten = ""
        except OSError as error:
            if not self.unwritten:
                _log.warning("what was lent and asked back cannot be written down: %s", error)
            self.unwritten = f"{error.strerror or error}"

    def kept(self) -> list[Asked]:
        """What the agent before us was asked and has not done yet."""
        try:
            state = json.loads(self._file.read_text())
            if state["offer"] is None:
                return []
            offer = msgspec.convert(state["offer"], Offer)
            known = {gpu.id for gpu in self._gpus}
            if not {gpu.id for gpu in offer.gpus} <= known:
                raise Damaged("GPUs that were lent are gone")
            same_boot = state.get("boot") == boot_id()
            notices = [
                ev.ReclaimAsked(
                    request=self.mint(),
                    gpus=tuple(GpuId(gpu) for gpu in notice["gpus"]),
                    grace=max(self._left(notice, same_boot=same_boot), 0),
                    cause=Cause(notice["cause"]),
                    reason=str(notice["reason"]),
                )
                for notice in state["notices"]
            ]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, Damaged) as error:
            _log.warning("what was lent before is not known any more (%s); lend again", error)
            return []
        return [ev.LendAsked(request=self.mint(), offer=offer), *notices]

    def _left(self, notice: dict[str, Any], *, same_boot: bool) -> int:
        if same_boot:
            return int(notice["monotonic"]) - time.monotonic_ns()
        return int(notice["deadline"]) - self._clock.now()
