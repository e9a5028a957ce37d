"""The owner's word: what was asked of an agent as events for its mind, and kept on disk.

An agent that dies has promised its owner something, and the next one keeps it. The offer is what
the owner has said last, changed only in what is said anew: nothing that was taken back is lent, and
no term is widened, unless the owner says so.
"""

import getpass
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from reclaimnet.adapters.linux.boot import boot_id
from reclaimnet.apps.calendar import show_terms
from reclaimnet.apps.live.clock import Clock
from reclaimnet.apps.notes import write_down
from reclaimnet.engine.provider import Provider
from reclaimnet.errors import NotFound, UsageError
from reclaimnet.model import events as ev
from reclaimnet.model.asking import LendRequest, ReclaimRequest, WithdrawRequest
from reclaimnet.model.market import Cause, Gpu, GpuId, NodeId, NoticeId, Offer, Terms

Asked = ev.LendAsked | ev.ReclaimAsked | ev.WithdrawAsked

FILE: Final = "provider.json"
"""In the agent's folder."""
NEVER: Final = 0
AT_SOME_TIME: Final = 1
"""The owner has spoken, and nobody knows when or what."""

_log = logging.getLogger("reclaimnet.agent")


class OwnersWord:
    def __init__(self, *, node: NodeId, gpus: tuple[Gpu, ...], file: Path, clock: Clock) -> None:
        self._node = node
        self._gpus = gpus
        self._file = file
        self._clock = clock
        self._requests = 0
        self._before: Offer | None = None
        """What the owner had said before this agent lived."""
        self._parting: tuple[Offer, set[GpuId]] | None = None
        """What stood when the agent began to end, and which of its GPUs nobody had asked back."""
        self.said_at = NEVER
        """When the owner spoke last."""
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
        # While the agent ends, too, the owner has the last word.
        self._parting = None
        match request:
            case LendRequest():
                return self._lend(request, provider)
            case ReclaimRequest():
                return self._reclaim(request, provider)
            case WithdrawRequest():
                self._check_unspoken(request.as_of)
                return ev.WithdrawAsked(request=self.mint())

    def _lend(self, request: LendRequest, provider: Provider) -> ev.LendAsked:
        self._check_unspoken(request.as_of)
        if request.notice is not None and request.notice < 0:
            raise UsageError("a notice cannot be negative; use 0s for none")
        before = provider.standing or provider.said or self._before
        offer = Offer(
            provider=getpass.getuser(),
            gpus=self._chosen(request, before),
            terms=self._changed(before.terms if before else Terms(), request),
        )
        return ev.LendAsked(request=self.mint(), offer=offer)

    def _check_unspoken(self, as_of: int | None) -> None:
        """That nobody has spoken since then, be it that nobody ever has."""
        if as_of is not None and self.said_at not in (NEVER, as_of):
            raise UsageError(
                f"the owner of {self._node} has said something else since; `rn lend` lends it again"
            )

    def _chosen(self, request: LendRequest, before: Offer | None) -> tuple[Gpu, ...]:
        if request.which:
            chosen = {self._gpu(word) for word in request.which}
        else:
            known = {gpu.id for gpu in self._gpus}
            last = [gpu.id for gpu in before.gpus if gpu.id in known] if before else []
            rest = [gpu.id for gpu in self._gpus if gpu.id not in last]
            count = len(last) or len(rest) if request.gpus is None else request.gpus
            chosen = set((last + rest)[:count]) if 0 < count <= len(self._gpus) else set()
            if not chosen:
                raise UsageError(
                    f"{self._node} has {len(self._gpus)} GPUs; it cannot lend {count}"
                    + (" (`rn reclaim` takes all of them back)" if count == 0 else "")
                )
        return tuple(gpu for gpu in self._gpus if gpu.id in chosen)

    def _changed(self, terms: Terms, request: LendRequest) -> Terms:
        """In what was said; hours come with their offset."""
        said = {
            name: value
            for name in ("notice", "users", "hours", "utc_offset", "maintenance", "ends")
            if (value := getattr(request, name)) is not None
        }
        if "hours" in said:
            said.setdefault("utc_offset", 0)
        changed = replace(terms, **said)
        if request.ends == 0 or (request.ends is None and self._is_over(terms.ends)):
            # An end that has passed was that of another loan.
            changed = replace(changed, ends=None)
        return changed

    def repeated(self, offer: Offer) -> str:
        """The terms, and what is not lent."""
        said = ", ".join(show_terms(offer.terms, self._clock.now()))
        said = f"{said[0].upper()}{said[1:]}."
        lent = {gpu.id for gpu in offer.gpus}
        yours = [str(gpu.index) for gpu in self._gpus if gpu.id not in lent]
        if yours:
            one = len(yours) == 1
            said += f" GPU{'s' * (not one)} {', '.join(yours)} stay{'s' * one} yours"
            said += f" (`rn lend --gpus {len(self._gpus)}` lends all)."
        return said

    def _is_over(self, ends: int | None) -> bool:
        return ends is not None and ends <= self._clock.now()

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
        if len({frozenset(notice.gpus) for notice in running}) > 1 and not wanted:
            raise UsageError("several notices are running; say on which GPU, for example: --gpu 0")
        # Of several on the same GPUs, the one that holds.
        return min(running, key=lambda notice: (notice.deadline, notice.id)).id

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
                "offer": self._stands(provider),
                "said": provider.said or self._before,
                "said_at": self.said_at,
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

    def part(self, provider: Provider) -> None:
        """The agent ends, and guests leave: that is no word of the owner's about the loan, which
        the next agent goes on with."""
        stands = provider.standing
        if stands is not None:
            asked_back = {
                gpu
                for notice in provider.notices.values()
                if notice.cause is not Cause.HOURS
                for gpu in notice.gpus
            }
            self._parting = stands, {gpu.id for gpu in stands.gpus} - asked_back

    def _stands(self, provider: Provider) -> Offer | None:
        """What is lent, or will be by itself when its hours begin."""
        if self._parting is None:
            return provider.standing
        offer, staying = self._parting
        # Notices that run are kept, and so are their GPUs.
        staying = staying | provider.leaving()
        gpus = tuple(gpu for gpu in offer.gpus if gpu.id in staying)
        return replace(offer, gpus=gpus) if gpus else None

    def kept(self) -> list[Asked]:
        """What the agent before us was asked and has not done yet."""
        try:
            state = _read(self._file)
            kept, said = (
                None if state.get(name) is None else msgspec.convert(state[name], Offer)
                for name in ("offer", "said")
            )
            self._before = said or kept
            self.said_at = int(state.get("said_at", AT_SOME_TIME))
            offer = self._still_here(kept)
            if offer is None:
                return []
            same_boot = state.get("boot") == boot_id()
            lent = {gpu.id for gpu in offer.gpus}
            notices = [
                ev.ReclaimAsked(
                    request=self.mint(),
                    gpus=gpus,
                    grace=max(_left(notice, same_boot=same_boot, now=self._clock.now()), 0),
                    cause=Cause(notice["cause"]),
                    reason=str(notice["reason"]),
                )
                for notice in state["notices"]
                if (gpus := tuple(GpuId(gpu) for gpu in notice["gpus"] if gpu in lent))
            ]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.said_at = self.said_at or AT_SOME_TIME
            _log.warning("what was lent before is not known any more (%s); lend again", error)
            return []
        return [ev.LendAsked(request=self.mint(), offer=offer), *notices]

    def _still_here(self, offer: Offer | None) -> Offer | None:
        """The GPUs of it that the machine still has."""
        if offer is None:
            return None
        known = {gpu.id for gpu in self._gpus}
        gone = [gpu.id for gpu in offer.gpus if gpu.id not in known]
        if gone:
            _log.warning("GPUs that were lent are gone: %s", ", ".join(gone))
        left = tuple(gpu for gpu in offer.gpus if gpu.id in known)
        return replace(offer, gpus=left) if left else None


def _read(file: Path) -> dict[str, Any]:
    state = json.loads(file.read_text())
    if not isinstance(state, dict):
        raise ValueError(f"{file.name} holds no word of an owner")
    return state


def take_back(file: Path) -> bool:
    """Where no agent answers: the owner takes all back, and the next one finds it so. Whether that
    could be written down."""
    try:
        state = _read(file)
    except FileNotFoundError:
        return True  # Nothing was ever lent.
    except (OSError, ValueError):
        return False  # Of what cannot be read, nothing is lent either; but it stays to be seen.
    said = state.get("offer") or state.get("said")
    taken = {**state, "offer": None, "said": said, "notices": [], "said_at": time.time_ns()}
    try:
        write_down(file, json.dumps(taken))
    except OSError:
        return False
    return True


def give_notice(file: Path, *, grace: int | None, reason: str) -> tuple[int, bool] | None:
    """Where no agent lives: the owner wants all back by a deadline, which the next one keeps. None
    grace means what was promised. How long guests have, and whether that could be written down;
    None if nothing is lent, as far as is known."""
    try:
        state = _read(file)
        offer = None if state["offer"] is None else msgspec.convert(state["offer"], Offer)
        running = [_told_anew(notice, state.get("boot")) for notice in state["notices"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if offer is None:
        return None
    grace = offer.terms.notice if grace is None else grace
    notice = {
        "gpus": [gpu.id for gpu in offer.gpus],
        "deadline": time.time_ns() + grace,
        "monotonic": time.monotonic_ns() + grace,
        "cause": Cause.RECLAIM,
        "reason": reason,
    }
    told = {**state, "boot": boot_id(), "notices": [*running, notice], "said_at": time.time_ns()}
    try:
        write_down(file, json.dumps(told))
    except OSError:
        return grace, False
    return grace, True


def _told_anew(notice: dict[str, Any], boot: object) -> dict[str, Any]:
    """With its deadline by the clocks of now: all of a file's notices are of one boot."""
    same_boot = boot == boot_id()
    left = _left(notice, same_boot=same_boot, now=time.time_ns())
    return {
        **notice,
        "deadline": time.time_ns() + left,
        "monotonic": time.monotonic_ns() + left,
    }


def _left(notice: dict[str, Any], *, same_boot: bool, now: int) -> int:
    if same_boot:
        return int(notice["monotonic"]) - time.monotonic_ns()
    return int(notice["deadline"]) - now


def is_taken_back(file: Path) -> bool:
    """Whether the owner has said last that nothing is lent, as far as is known."""
    return _says(
        file,
        lambda state: state.get("offer") is None and state.get("said_at", AT_SOME_TIME) != NEVER,
    )


def has_lent(file: Path) -> bool:
    """Whether the owner has ever lent something, as far as is known."""
    return _says(file, lambda state: any(state.get(name) is not None for name in ("offer", "said")))


def _says(file: Path, this: Callable[[dict[str, Any]], bool]) -> bool:
    """Of a word that cannot be read, the more careful is believed; where none is, nothing."""
    try:
        return this(_read(file))
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
