"""An agent's line to the guard: guests are housed, their deadlines held in the kernel.

Requests are sent in turn, by one thread. The guard needs none of them to keep a deadline it has
heard of; so one that fails is said in the log, and what it was for holds by the minder alone.
"""

import contextlib
import functools
import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from reclaimnet.apps.guard_client import GuardClient
from reclaimnet.errors import NotFound, ReclaimNetError, Unavailable
from reclaimnet.model.market import EdgeCount, JobId
from reclaimnet.model.orders import Rotate

COUNT_EVERY_S: Final = 10.0
CLOSE_PATIENCE_S: Final = 2.0
"""How long an agent that ends waits for the guard to hear all that it was to be told. Guests whose
end it does not hear of end by their minders, and their packets with the lease."""

MOST: Final = 12_500_000_000
"""100 Gbit/s in bytes a second: as good as no limit at all."""

_log = logging.getLogger("reclaimnet.agent")


class Guarded:
    """Times are nanoseconds since 1970."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._client: GuardClient | None = GuardClient(path)
        self._turn = ThreadPoolExecutor(1, "reclaimnet-guard")
        self._closed = False
        self._deadlines: dict[str, int] = {}
        self._guests: set[str] = set()
        self._renewals: dict[str, int] = {}
        """Until when those may go on whose renewal waits for its turn; under `_renewing`."""
        self._renewing = threading.Lock()
        self._counting: Future[None] | None = None
        self._paced: set[str] = set()
        self._held: set[str] = set()
        """Those that talk in their slots only, or after others."""
        self.lane = False
        """Checkpoints are served from the guests' lane, where the guard can shape them."""
        self._counted: tuple[EdgeCount, ...] = ()
        self._counted_at = -COUNT_EVERY_S

    def listen(self) -> socket.socket | None:
        """A listening socket in the guests' lane; None if this machine has no lane."""
        try:
            with GuardClient(self._path) as client:
                listener = client.listen()
                self.lane = True
                return listener
        except (ReclaimNetError, IndexError) as error:
            _log.info("checkpoints are served outside of a lane: %s", error)
            return None

    def admit(self, job: JobId, epoch: int, pid: int) -> None:
        """House what descends from the process; raises if the guard does not want it."""
        guest = _name(job, epoch)
        deadline = self._deadlines.get(guest)
        self._ask("open", guest=guest, pids=[pid], deadline=deadline)
        self._guests.add(guest)
        if self._deadlines.get(guest) != deadline:
            # It was set, or taken back, while the guard was opening the door.
            told = self._turn.submit(self._tell_deadline, guest)
            if not told.result():
                raise Unavailable(f"The guard has not taken in the deadline of {guest}.")

    def adopt(self, job: JobId, epoch: int) -> None:
        """The agent before us had it admitted: the guard still knows it."""
        self._guests.add(_name(job, epoch))

    def limit(self, job: JobId, epoch: int, at: int | None) -> None:
        """Packets and processes end by then, even if we and the guard are gone."""
        guest = _name(job, epoch)
        if at is not None:
            self._deadlines[guest] = at
        elif self._deadlines.pop(guest, None) is None:
            return
        if guest in self._guests:
            self._turn.submit(self._tell_deadline, guest)

    def _tell_deadline(self, guest: str) -> bool:
        """The one that holds by now, whatever held when this was wanted: the last that the guard
        hears is the one it keeps. Whether it ends the guest no later than that."""
        deadline = self._deadlines.get(guest)
        if guest not in self._guests:
            return True
        try:
            self._ask("deadline", guest=guest, deadline=deadline)
        except ReclaimNetError as error:
            # Only the owner may give time back; a guard that does not take us for one refuses.
            _log.warning("the guard was told another deadline of %s: %s", guest, error)
            return deadline is None
        return True

    def renew(self, jobs: tuple[JobId, ...], until: int) -> None:
        # A copy, since one may be admitted this very moment.
        names = {guest for guest in tuple(self._guests) if guest.rpartition(".")[0] in jobs}
        for guest in sorted(names):
            with self._renewing:
                waits = guest in self._renewals
                self._renewals[guest] = until
            if not waits:
                self._turn.submit(self._renew, guest)

    def _renew(self, guest: str) -> None:
        """For as long as holds by now, however long it has waited for its turn."""
        with self._renewing:
            until = self._renewals.pop(guest)
        self._try("renew", guest=guest, until=until)

    def end(self, job: JobId, epoch: int) -> None:
        """Packets first, then the processes."""
        if _name(job, epoch) in self._guests:
            self._later("stop", guest=_name(job, epoch))

    def forget(self, job: JobId, epoch: int) -> None:
        guest = _name(job, epoch)
        self._deadlines.pop(guest, None)
        if guest in self._guests:
            self._guests.discard(guest)
            self._held.discard(guest)
            self._later("stop", guest=guest)

    def edge(self) -> tuple[EdgeCount, ...]:
        """What the guard counted when it was last asked, which is not long ago."""
        due = time.monotonic() - self._counted_at > COUNT_EVERY_S
        if due and (self._counting is None or self._counting.done()):
            self._counted_at = time.monotonic()
            self._counting = self._turn.submit(self._count)
        return self._counted

    def _count(self) -> None:
        try:
            counts = self._ask("counts")["counts"]
        except ReclaimNetError as error:
            _log.warning("the guard's counters could not be read: %s", error)
            return
        self._counted = tuple(
            EdgeCount(kind=kind, way=key.split("_")[0], verdict=key.split("_")[1], **count)
            for kind, by_key in sorted(counts.items())
            for key, count in by_key.items()
        )

    def hold_to(
        self,
        transfer: str,
        rate: int,
        connections: Sequence[socket.socket],
        otherwise: Callable[[], None],
    ) -> None:
        """A class of its own at the edge for a transfer, in bytes a second, and its sockets in it.
        What the guard cannot do is done `otherwise`."""
        name = _short(transfer)

        def ask() -> None:
            try:
                self._ask("pace", transfer=name, rate=self._allowed(rate))
                # A small transfer may be over before it is its turn.
                still = [one for one in connections if one.fileno() >= 0]
                if still:
                    self._ask("mark", transfer=name, sockets=still)
                self._paced.add(name)
            except (ReclaimNetError, OSError, ValueError) as error:
                _log.info("%s is paced without the guard: %s", transfer, error)
                otherwise()

        if self.lane:
            self._turn.submit(ask)
        else:
            otherwise()

    def sent(self, job: JobId, epoch: int) -> int:
        """Bytes that the guest has sent, by the kill switch's own count."""
        name = _name(job, epoch)
        for guest in self._ask("status")["guests"]:
            if guest["guest"] == name:
                return int(guest["counts"]["out_passed"]["bytes"])
        raise NotFound(f"the guard knows no guest {name}")

    def holds_slots(self) -> bool:
        """Whether what runs beside us can be held to slots: we are in the lane that is shaped."""
        lane = self._ask("status")["can"].get("slots", 0)
        return bool(lane) and os.stat("/proc/self/ns/net").st_ino == lane

    def hold(self, order: Rotate) -> None:
        """Let the job talk in its slots only, whatever it knows, and after those of lower levels;
        without slots: when it likes."""
        guest = _name(order.job, order.epoch)
        if (order.slots or order.level) and guest in self._guests:
            self._held.add(guest)
        elif guest in self._held:
            self._held.discard(guest)
        else:
            return
        self._later(
            "slots",
            guest=guest,
            anchor=order.anchor,
            period=order.period if order.slots else 0,
            slots=list(order.slots),
            level=order.level,
        )

    def let_go(self, transfer: str) -> None:
        """The transfer is over, and its class with it."""
        name = _short(transfer)
        if name in self._paced:
            self._paced.discard(name)
            self._later("pace", transfer=name, rate=0, guest=transfer)

    def _allowed(self, rate: int) -> int:
        """No more than the owner's terms: more would be refused, and the old rate stay."""
        terms = self._ask("status")["terms"]["rate"]
        return min(rate, MOST) if terms is None else min(rate, terms)

    def close(self) -> None:
        last = self._turn.submit(lambda: None)
        with contextlib.suppress(TimeoutError):
            last.result(CLOSE_PATIENCE_S)
        self._closed = True
        self._turn.shutdown(wait=last.done(), cancel_futures=True)
        if last.done():
            self._hang_up()
        # Else whoever still waits for an answer does so.

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _later(self, verb: str, **request: Any) -> None:
        self._turn.submit(functools.partial(self._try, verb, **request))

    def _try(self, verb: str, **request: Any) -> None:
        try:
            self._ask(verb, **request)
        except NotFound:
            pass
        except ReclaimNetError as error:
            _log.warning("the guard was asked to %s %s: %s", verb, request["guest"], error)

    def _ask(self, verb: str, **request: Any) -> dict[str, Any]:
        """Once more on a new connection if the guard was restarted."""
        with self._lock:
            for attempt in (1, 2):
                try:
                    if self._client is None:
                        self._client = GuardClient(self._path)
                    return self._client.ask(verb, **request)
                except Unavailable:
                    self._hang_up()
                    if attempt == 2 or self._closed:
                        raise
                finally:
                    if self._closed:
                        self._hang_up()
            raise AssertionError("the second try returns or raises")


def _short(transfer: str) -> str:
    """The guard's names are short, and of few letters."""
    return f"t-{hashlib.blake2s(transfer.encode(), digest_size=12).hexdigest()}"


def _name(job: JobId, epoch: int) -> str:
    return f"{job}.{epoch}"
