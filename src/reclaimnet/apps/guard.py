"""The guard: a small root process that keeps the owner's word when everything else has failed.

It holds the kill switch, the guests' cgroups and the shaping of their traffic. It listens on a Unix
socket and knows who speaks by the kernel's word (SO_PEERCRED). The agent may ask for less time or
less traffic at any moment, and for more only within the owner's terms. Those come from a file that
only root can write, or from the owner's own uid. What it promises:

- At a guest's deadline no packet of it passes (the kernel sees to that, with or without us) and
  no process of it is left (we see to that, with or without the agent).
- If we are gone, guest packets stop within the lease, since nobody renews it.
- If we come back, we go on where we were.

One request is one packet of JSON, and so is its answer: {"verb": "open", ...} -> {"ok": true, ...}.
"""

import contextlib
import json
import os
import re
import selectors
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from reclaimnet.adapters.linux import bpfload, tc
from reclaimnet.adapters.linux.bpf_killswitch import (
    ALL,
    FIRST_GUEST,
    GONE,
    LANE,
    NEVER,
    Counts,
    KillSwitch,
    NoSwitch,
    now,
)
from reclaimnet.adapters.linux.memory import protect_self
from reclaimnet.adapters.linux.real_time import run_ahead
from reclaimnet.adapters.linux.slots import UNLIMITED, Turnstile
from reclaimnet.adapters.linux.tc_abilities import try_kill_switch, try_shaping
from reclaimnet.adapters.linux.tc_netns import inside, interface_index
from reclaimnet.apps.guard_config import GuardConfig, OwnerTerms, narrower, read_config, read_terms
from reclaimnet.apps.guard_processes import (
    Process,
    house,
    kill,
    living,
    members,
    prepare_cgroups,
    remove_group,
    started_at,
)
from reclaimnet.errors import Forbidden, NotFound, ReclaimNetError, Unavailable, UsageError
from reclaimnet.model.units import MILLISECOND, SECOND

END_AHEAD: Final = 100 * MILLISECOND
"""A killed process needs the CPU once more to end, on a busy machine for tens of milliseconds; at
the deadline that has to be over."""
CHECK_EVERY: Final = 20 * MILLISECOND
"""How soon to look again whether a guest that was killed is gone, and to kill what is not."""
RENEWALS_PER_LEASE: Final = 5
MAX_PEERS: Final = 16
MAX_REQUEST: Final = 64 << 10
MAX_FDS: Final = 16
MAX_PIDS: Final = 256
MAX_GONE: Final = 1024
"""So many later, the kernel has long given up on the sockets of a guest that has left."""
MAX_GUESTS: Final = GONE - FIRST_GUEST
KEPT_ENDED: Final = 64
BACKLOG: Final = 128

LANE_NAME: Final = "lane"
"""Not a guest: whatever crosses the lane and belongs to none, such as checkpoints on their way."""

VERBS: Final = ("open", "deadline", "renew", "stop", "stop_all", "pace", "mark", "slots", "listen")
VERBS_TO_SEE: Final = ("status", "counts")
OWNERS_VERBS: Final = ("terms", "resume")

_GUEST_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


# --- what is known of a guest --------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Guest:
    name: str
    slot: int
    deadline: int
    """On the kill switch's clock; NEVER if there is none."""
    cgroup: Path | None = None
    cgroup_id: int = 0
    processes: list[Process] = field(default_factory=list)
    ending: bool = False
    before: Counts = field(default_factory=Counts)
    """What its slot had counted when it came: that was somebody else's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, who made it, the descriptors that came along, and those that go back."""

    request: Mapping[str, Any]
    uid: int
    fds: Sequence[int] = ()
    give: list[int] = field(default_factory=list)


Answer = dict[str, Any]


class Guard:
    """All that the guard decides. One thread calls it; nothing in it waits for anybody."""

    def __init__(self, config: GuardConfig) -> None:
        _check_machine(config)
        self.config = config
        self.terms = config.terms
        self.guests: dict[str, Guest] = {}
        self.transfers: dict[str, tuple[int, int]] = {}
        self.gone: deque[int] = deque()
        self.lane_deadline = NEVER
        self.halted = False
        self.ended: deque[str] = deque(maxlen=KEPT_ENDED)
        self._boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._renewed = 0
        self._checked = 0
        config.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._cgroups = prepare_cgroups(config.cgroup)
        self.switch = _open_switch(config)
        self._shaper: tc.Shaper | None = None
        self._turnstile = Turnstile(config.lane_inner, netns=config.lane_netns)
        self._load()
        self._prepare_shaper()
        self._apply_terms()
        self.tick()

    # --- time passes

    def tick(self) -> int:
        """Do what is due; returns when to come back, on the kill switch's clock."""
        moment = now()
        period = self.config.lease // RENEWALS_PER_LEASE
        if moment >= self._renewed + period:
            self.switch.set_lease(ALL, 0 if self.halted else moment + self.config.lease)
            self._renewed = moment
        for guest in list(self.guests.values()):
            if not guest.ending and moment >= guest.deadline - END_AHEAD:
                self._end(guest)
        due = [guest.deadline - END_AHEAD for guest in self.guests.values() if not guest.ending]
        if len(due) < len(self.guests):
            if moment >= self._checked + CHECK_EVERY:
                self._finish()
                self._checked = now()
            due.append(self._checked + CHECK_EVERY)
        return min([self._renewed + period, *due])

    # --- the verbs

    def handle(self, call: Call) -> Answer:
        """Carry out one request. A refusal is an answer too; nothing is half done."""
        verb = str(call.request.get("verb"))
        try:
            known = VERBS + VERBS_TO_SEE + OWNERS_VERBS
            if verb not in known:
                raise UsageError(f"The guard knows no {verb[:40]!r}; it knows {', '.join(known)}.")
            if verb in OWNERS_VERBS:
                self._check_owner(call, verb)
            carry_out: Callable[[Call], Answer] = getattr(self, f"_verb_{verb}")
            return {"ok": True, **carry_out(call)}
        except ReclaimNetError as error:
            return {"ok": False, "error": str(error)}
        except OSError as error:
            return {"ok": False, "error": f"{verb} failed: {error}."}

    def _check_owner(self, call: Call, what: str) -> None:
        if call.uid not in (0, self.config.owner_uid):
            raise Forbidden(f"Only the machine's owner may ask for {what}.")

    def _verb_open(self, call: Call) -> Answer:
        """Let a guest in: its processes go into a cgroup, its packets may pass until its deadline.

        The processes must not have opened sockets yet, since a socket belongs to the group that
        its process was in when it was made.
        """
        name = _name(call.request, "guest")
        if name == LANE_NAME:
            raise UsageError(f"No guest can be called {LANE_NAME}.")
        deadline = self._within_terms(_moment(call.request, "deadline"))
        processes = [_process(pid, call.uid) for pid in _pids(call.request)]
        if self.halted:
            raise Forbidden("The owner has stopped all guests; only the owner may resume.")
        self._check_new(name, processes)
        guest = self.guests.get(name) or self._new_guest(name, deadline)
        if guest.ending:
            raise Forbidden(f"{name} is being ended.")
        self._set_deadline(guest, min(deadline, guest.deadline))  # asking again gives no more
        guest.processes += [one for one in processes if one not in guest.processes]
        try:
            self._save()  # before anything of it can run: a restart finds it in any case
            self._house(guest, processes)
            self._save()
        except OSError:
            self._end(guest)  # it is not where it should be, so it may not be here
            raise
        return self._describe(guest)

    def _new_guest(self, name: str, deadline: int) -> Guest:
        if len(self.guests) >= min(self.terms.guests, MAX_GUESTS):
            raise Forbidden(f"The owner's terms allow {self.terms.guests} guests at a time.")
        used = {other.slot for other in self.guests.values()}
        slot = next(slot for slot in range(FIRST_GUEST, GONE) if slot not in used)
        self.switch.set_lease(slot, NEVER)
        before = self.switch.counts(slot)
        self.guests[name] = Guest(name=name, slot=slot, deadline=deadline, before=before)
        return self.guests[name]

    def _check_new(self, name: str, processes: Sequence[Process]) -> None:
        """A guest does not get rid of its deadline by coming in again under another name."""
        others = [guest for guest in self.guests.values() if guest.name != name]
        taken = living([one for guest in others for one in guest.processes], self._cgroups)
        taken -= set() if self._cgroups is None else set(members(self._cgroups / name))
        for process in processes:
            if process.pid in taken:
                raise Forbidden(f"Process {process.pid} belongs to a guest that is here already.")

    def _verb_deadline(self, call: Call) -> Answer:
        """A guest leaves earlier, whoever asks, or later, if the owner does and the terms allow it.
        The guest "lane" is what is sent on behalf of guests."""
        wanted = self._within_terms(_moment(call.request, "deadline"))
        guest = None if call.request.get("guest") == LANE_NAME else self._guest(call.request)
        if wanted > (self.lane_deadline if guest is None else guest.deadline):
            self._check_owner(call, "more time")
        if guest is None:
            self.lane_deadline = wanted
            self._apply_terms()
        elif guest.ending:
            raise Forbidden(f"{guest.name} is being ended.")
        else:
            self._set_deadline(guest, wanted)
        self._save()
        return {} if guest is None else self._describe(guest)

    def _verb_renew(self, call: Call) -> Answer:
        """The agent vouches for its guests until then. Never past a deadline: both are checked."""
        until = _moment(call.request, "until")
        one = "guest" in call.request
        for guest in [self._guest(call.request)] if one else self.guests.values():
            if not guest.ending:
                self.switch.set_lease(guest.slot, until)
        return {}

    def _verb_stop(self, call: Call) -> Answer:
        """Packets first, then the processes. Stopping who has left is no mistake."""
        guest = self.guests.get(_name(call.request, "guest"))
        if guest is not None:
            self._end(guest)
            self._finish()
        return {}

    def _verb_stop_all(self, call: Call) -> Answer:
        self.switch.stop(ALL)
        self.halted = True
        for guest in self.guests.values():
            self._end(guest)
        self._save(durable=True)
        return {"guests": list(self.guests)}

    def _verb_pace(self, call: Call) -> Answer:
        """Hold a transfer to a rate in bytes a second; 0 ends it. `mark` says which sockets."""
        shaper = self._shaper
        if shaper is None:
            raise Unavailable("Nothing is shaped here: the guard's file names no lane_netns.")
        name, rate = _name(call.request, "transfer"), _whole(call.request, "rate")
        if self.terms.rate is not None and rate > self.terms.rate:
            raise Forbidden(f"The owner's terms allow {self.terms.rate} bytes a second.")
        minor, _old = self.transfers.get(name, (0, 0))
        if rate == 0:
            if minor:
                shaper.drop(minor)
                del self.transfers[name]
                self._save()
            return {}
        if minor:
            shaper.set_rate(minor, rate)
        else:
            minor = tc.free_class({minor for minor, _ in self.transfers.values()})
            shaper.open(minor, rate)
        self.transfers[name] = (minor, rate)
        self._save()
        return {"class": tc.class_id(minor)}

    def _verb_mark(self, call: Call) -> Answer:
        """Put the sockets that came along into a transfer's class, and mark them lower effort."""
        name = _name(call.request, "transfer")
        if name not in self.transfers:
            raise NotFound(f"No transfer {name} is paced; ask for its pace first.")
        if not call.fds:
            raise UsageError("To mark sockets, send them along (SCM_RIGHTS).")
        for fd in call.fds:
            with socket.socket(fileno=os.dup(fd)) as sock:
                tc.mark(sock, self.transfers[name][0])
        return {"marked": len(call.fds)}

    def _verb_slots(self, call: Call) -> Answer:
        """A guest in the lane talks in its slots only; a period of 0: whenever it likes."""
        guest = self._guest(call.request)
        return self._turnstile.ask(guest.slot, guest.cgroup, call.request)

    def _verb_listen(self, call: Call) -> Answer:
        """A listening socket in the lane, for an agent that serves checkpoints from outside it."""
        netns = self.config.lane_netns
        if netns is None:
            raise Unavailable("There is no lane here: the guard's file names no lane_netns.")
        port = _whole(call.request, "port")
        if port > 65535:
            raise UsageError("port must be at most 65535.")
        made = inside(netns, lambda: socket.create_server(("", port), backlog=BACKLOG))
        call.give.append(made.detach())
        return {}

    def _verb_status(self, call: Call) -> Answer:
        return {
            "guests": [self._describe(guest) for guest in self.guests.values()],
            "ended": list(self.ended),
            "transfers": {name: rate for name, (_, rate) in self.transfers.items()},
            "terms": asdict(self.terms),
            "halted": self.halted,
            "can": {
                "kill_switch": isinstance(self.switch, KillSwitch),
                "cgroup": self._cgroups is not None,
                "shape": self._shaper is not None,
                "slots": self._turnstile.lane if self._cgroups else 0,
            },
        }

    def _verb_counts(self, call: Call) -> Answer:
        """What was counted since the machine started, by class: guests that are or were here, what
        crosses the lane for them, and what came from guests after they had gone."""
        slots = {"guests": range(FIRST_GUEST, GONE), "lane": [LANE], "gone": [GONE]}
        sums = {
            name: sum(map(self.switch.counts, those), Counts()) for name, those in slots.items()
        }
        return {"counts": {name: asdict(counts) for name, counts in sums.items()}}

    def _verb_terms(self, call: Call) -> Answer:
        """New terms hold at once, also for guests that are here already."""
        given = {key: value for key, value in call.request.items() if key != "verb"}
        try:
            self.terms = narrower(read_terms(given, self.terms), self.config.terms)
        except ValueError as error:
            raise UsageError(f"These terms will not do: {error}.") from error
        self._apply_terms()
        self._save(durable=True)
        return {"terms": asdict(self.terms)}

    def _verb_resume(self, call: Call) -> Answer:
        self.halted = False
        self._renewed = 0  # the lease is due at once
        self._save(durable=True)
        return {}

    def _within_terms(self, deadline: int) -> int:
        """A deadline that the owner's terms allow. None at all means: as late as they allow."""
        latest = NEVER if self.terms.until is None else _on_our_clock(self.terms.until)
        if deadline != NEVER and deadline > latest:
            raise Forbidden("The owner's terms end before that deadline.")
        return min(deadline, latest)

    def _apply_terms(self) -> None:
        latest = NEVER if self.terms.until is None else _on_our_clock(self.terms.until)
        self.switch.set_deadline(ALL, latest)
        self.switch.set_deadline(LANE, min(latest, self.lane_deadline))
        self.switch.set_lease(LANE, NEVER)
        if self._shaper is not None:
            self._shaper.set_link_rate(self.terms.rate or UNLIMITED)
        for guest in self.guests.values():
            if latest < guest.deadline:
                self._set_deadline(guest, latest)

    def _set_deadline(self, guest: Guest, deadline: int) -> None:
        guest.deadline = deadline
        self.switch.set_deadline(guest.slot, deadline)

    def _house(self, guest: Guest, processes: Sequence[Process]) -> None:
        if self._cgroups is None:
            return
        guest.cgroup = self._cgroups / guest.name
        guest.cgroup.mkdir(exist_ok=True)
        identity = guest.cgroup.stat().st_ino
        if identity != guest.cgroup_id:
            guest.cgroup_id = identity
            self.switch.admit(guest.cgroup, guest.slot)
        house(processes, guest.cgroup)

    def _end(self, guest: Guest) -> None:
        """Network first: killing a sender still lets a megabyte out of its buffers. The disk last:
        it may be full, or take its time."""
        self.switch.stop(guest.slot)
        self._turnstile.let_go(guest.slot)
        # Many may end at once: what is not in its group is looked for by `_finish`, a moment later.
        kill([] if guest.cgroup is not None else guest.processes, guest.cgroup)
        if not guest.ending:
            guest.ending = True
            self._save_if_possible()

    def _finish(self) -> None:
        """Forget the guests that are gone; kill again what is not."""
        for guest in [guest for guest in self.guests.values() if guest.ending]:
            if living(guest.processes, guest.cgroup):
                kill(guest.processes, guest.cgroup)
                continue
            if guest.cgroup is not None:
                with contextlib.suppress(OSError):  # busy for a moment yet, or gone already
                    remove_group(guest.cgroup)
                if guest.cgroup.exists():
                    continue
            self.switch.dismiss(guest.cgroup_id, guest.slot)
            self.gone.append(guest.cgroup_id)
            while len(self.gone) > MAX_GONE:
                self.switch.forget(self.gone.popleft())
            del self.guests[guest.name]
            self.ended.append(guest.name)
            self._save_if_possible()

    def _prepare_shaper(self) -> None:
        netns, rate = self.config.lane_netns, self.terms.rate or UNLIMITED
        if netns is None:
            return
        self._shaper = tc.of_guests(self.config.lane_inner, netns=netns, rate=rate)
        for minor, rate in self.transfers.values():
            self._shaper.open(minor, rate)

    # --- what is kept on disk

    def _save(self, *, durable: bool = False) -> None:
        """The owner's word outlasts a power failure. Guests do not, and so their entries need not:
        waiting for a disk could cost the lease."""
        state = {
            "boot": self._boot,
            "terms": asdict(self.terms),
            "halted": self.halted,
            "lane_deadline": self.lane_deadline,
            "transfers": self.transfers,
            "gone": list(self.gone),
            "guests": [
                {**asdict(guest), "cgroup": None if guest.cgroup is None else str(guest.cgroup)}
                for guest in self.guests.values()
            ],
        }
        target = self.config.state / "state.json"
        temporary = target.with_suffix(".new")
        with temporary.open("w") as file:
            json.dump(state, file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(target)

    def _save_if_possible(self) -> None:
        try:
            self._save()
        except OSError as error:
            _note(f"the state cannot be written ({error}); guests are ended all the same.")

    def _load(self) -> None:
        """Go on where we were. If that cannot be read, nobody passes until the owner resumes."""
        path = self.config.state / "state.json"
        if not path.exists():
            return
        try:
            state = json.loads(path.read_text())
            self.terms = narrower(read_terms(state["terms"], OwnerTerms()), self.config.terms)
            self.halted = bool(state["halted"])
            if state["boot"] != self._boot:
                return  # the machine was restarted: no guest has survived that
            self.transfers = {name: (int(m), int(r)) for name, (m, r) in state["transfers"].items()}
            self.lane_deadline = int(state["lane_deadline"])
            self.gone.extend(state["gone"])
            for entry in state["guests"]:
                entry["cgroup"] = None if entry["cgroup"] is None else Path(entry["cgroup"])
                entry["processes"] = [Process(**one) for one in entry["processes"]]
                guest = Guest(**{**entry, "before": Counts.read(entry["before"])})
                self.guests[guest.name] = guest
                if not self.switch.resumed:
                    # The pins are gone but the guest is not: put the kill switch back on it.
                    self.switch.set_lease(guest.slot, NEVER)
                    if guest.cgroup is not None and guest.cgroup.exists():
                        self.switch.admit(guest.cgroup, guest.slot)
                in_force = self.switch.deadline(guest.slot) if self.switch.resumed else NEVER
                self._set_deadline(guest, min(guest.deadline, in_force))
        except (ValueError, KeyError, TypeError) as error:
            self.halted = True
            _note(f"{path} is damaged ({error!r}): all guests are ended until the owner resumes.")
            for group in [] if self._cgroups is None else self._cgroups.iterdir():
                if group.is_dir():  # nobody knows its deadline any more
                    kill([], group)

    def _guest(self, request: Mapping[str, Any]) -> Guest:
        name = _name(request, "guest")
        if name not in self.guests:
            raise NotFound(f"There is no guest {name}.")
        return self.guests[name]

    def _describe(self, guest: Guest) -> dict[str, Any]:
        wall = guest.deadline - now() + time.time_ns()
        return {
            "guest": guest.name,
            "slot": guest.slot,
            "deadline": None if guest.deadline == NEVER else wall,
            "cgroup": None if guest.cgroup is None else str(guest.cgroup),
            "ending": guest.ending,
            "counts": asdict(self.switch.counts(guest.slot).since(guest.before)),
        }

    def close(self) -> None:
        """Let go; the kill switch stays, and closes when the lease is over."""
        self._turnstile.close()
        if self._shaper is not None:
            self._shaper.close()
        self.switch.close()

    def remove(self) -> None:
        """Take everything off this machine. Guests end first."""
        for guest in self.guests.values():
            self._end(guest)
        end = now() + 5 * SECOND
        while self.guests and now() < end:
            self._finish()
            time.sleep(CHECK_EVERY / SECOND)
        self._turnstile.close()
        if self._shaper is not None:
            self._shaper.remove()
        self.switch.remove()
        bpfload.drop_pins(self.config.pins)
        if self._cgroups is not None:
            with contextlib.suppress(OSError):  # somebody else has put a group there
                self._cgroups.rmdir()
        (self.config.state / "state.json").unlink(missing_ok=True)


# --- reading requests ----------------------------------------------------------------------


def _request(data: bytes) -> Mapping[str, Any]:
    """What is no object of JSON is a request without a verb, and refused as such."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(data)
        if isinstance(found, dict):
            return found
    return {}


def _name(request: Mapping[str, Any], key: str) -> str:
    value = request.get(key)
    if not isinstance(value, str) or not _GUEST_NAME.fullmatch(value):
        raise UsageError(f"{key} must be a name of letters, digits, dots, dashes or underscores.")
    return value


def _whole(request: Mapping[str, Any], key: str) -> int:
    value = request.get(key)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise UsageError(f"{key} must be a whole number that is not negative.")
    return value


def _moment(request: Mapping[str, Any], key: str) -> int:
    """A moment given in nanoseconds since 1970, on our clock; none at all is NEVER."""
    return NEVER if request.get(key) is None else _on_our_clock(_whole(request, key))


def _pids(request: Mapping[str, Any]) -> list[int]:
    value = request.get("pids", [])
    few = isinstance(value, list) and len(value) <= MAX_PIDS
    if not few or not all(type(pid) is int and 1 < pid < 1 << 22 for pid in value):
        raise UsageError(f"pids must be a list of at most {MAX_PIDS} process ids.")
    return list(value)


def _process(pid: int, uid: int) -> Process:
    """A process that somebody may hand over: an own one, never somebody else's."""
    started = started_at(pid)
    if started is None:
        raise NotFound(f"There is no process {pid}.")
    if pid == os.getpid() or uid not in (0, os.stat(f"/proc/{pid}").st_uid):
        raise Forbidden(f"Process {pid} is not yours to give.")
    return Process(pid=pid, started=started)


def _on_our_clock(wall: int) -> int:
    return max(0, now() + wall - time.time_ns())


def _check_machine(config: GuardConfig) -> None:
    """Refuse what cannot be done here before anything is touched."""
    for interface in (*config.uplinks, *([] if config.lane is None else [config.lane])):
        interface_index(interface)
    if config.lane is not None or config.uplinks:
        try_kill_switch(config.cache)
    if config.lane_netns is not None:
        tc.check_free(config.lane_inner, netns=config.lane_netns)
        try_shaping()


def _open_switch(config: GuardConfig) -> KillSwitch | NoSwitch:
    """The kill switch on every interface that the owner's file names. If it names none, no BPF is
    needed, and the guard ends processes only."""
    if config.lane is None and not config.uplinks:
        return NoSwitch()
    bpfload.prepare_pins(config.pins)
    switch = KillSwitch(pins=config.pins, cache=config.cache)
    if config.lane is not None:
        switch.attach(config.lane, slot=LANE, shared=True)
    for uplink in config.uplinks:
        switch.attach_uplink(uplink)
    return switch


# --- the socket ----------------------------------------------------------------------------


class Server:
    """Waits for requests and for what is due, whichever comes first.

    Between two requests it always looks at the clock, and it never waits for a peer: nobody can
    keep it from renewing the lease or from ending a guest. A packet is a request with all that
    belongs to it, so nothing of one can be taken for a part of another.
    """

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.path = guard.config.socket
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, int] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not self.path.parent.exists():
            self.path.parent.mkdir(parents=True)
            self.path.parent.chmod(0o755)  # whatever our umask: the agent has to get in
        self.path.unlink(missing_ok=True)
        self._listener.bind(str(self.path))
        # Who may speak is decided by uid, below; the file's mode would only be a second answer.
        self.path.chmod(0o666)
        self._listener.listen(MAX_PEERS)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def serve(self) -> None:
        while not self._stopping:
            due = self.guard.tick()
            for key, _ in self._selector.select(max(0, due - now()) / SECOND):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._turn(key.fileobj)
                self.guard.tick()

    def stop(self) -> None:
        self._stopping = True

    def close(self) -> None:
        for peer in list(self._peers):
            self._drop(peer)
        self._selector.close()
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            _pid, uid, _gid = struct.unpack("3i", raw)
            known = (0, self.guard.config.owner_uid, self.guard.config.agent_uid)
            if uid not in known or len(self._peers) >= MAX_PEERS:
                connection.close()
                return
            connection.setblocking(False)
            self._peers[connection] = uid
            self._selector.register(connection, selectors.EVENT_READ)

    def _turn(self, connection: socket.socket) -> None:
        """Answer one request; whoever has more of them waits for its next turn."""
        fds: list[int] = []
        give: list[int] = []
        try:
            data, fds, flags, _ = socket.recv_fds(connection, MAX_REQUEST, MAX_FDS)
            if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ConnectionAbortedError("it has left, or it sends more than anybody needs")
            call = Call(request=_request(data), uid=self._peers[connection], fds=fds, give=give)
            socket.send_fds(connection, [json.dumps(self.guard.handle(call)).encode()], give)
        except OSError:  # that, or it does not read its answers
            self._drop(connection)
        finally:
            for fd in (*fds, *give):
                os.close(fd)

    def _drop(self, connection: socket.socket) -> None:
        del self._peers[connection]
        self._selector.unregister(connection)
        connection.close()


# --- the process ---------------------------------------------------------------------------


def prepared(config_path: Path) -> Guard:
    """The guard as it was when it ended, on a machine where it can be."""
    config = read_config(config_path)
    if os.geteuid() != 0:
        raise Unavailable("The guard has to run as root.")
    os.umask(0o077)
    return Guard(config)


def main(config_path: Path) -> None:
    """Run until SIGTERM. The kill switch stays in place when we go."""
    guard = prepared(config_path)
    server = Server(guard)
    protect_self()
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    signal.signal(signal.SIGINT, lambda *_: server.stop())
    _note(f"watching{'' if run_ahead() else ' (without real-time priority)'}: {server.path}")
    try:
        server.serve()
    finally:
        server.close()
        guard.close()


def _note(text: str) -> None:
    sys.stderr.write(f"guard: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "/etc/reclaimnet/guard.toml"))
    except ReclaimNetError as failure:
        _note(str(failure))
        sys.exit(failure.exit_code)
