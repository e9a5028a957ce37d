"""`rn bench chaos`: the real programs, killed, frozen, cut off and starved, round after round.

What is counted is what jobs, packets and the kernel say, not what our own records say: every job
writes each of its steps into a file outside, and every step sends a packet that is heard outside.
"""

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

from reclaimnet.apps import printing, swarm
from reclaimnet.apps.bench.chaos_agent import TIMING
from reclaimnet.apps.bench.chaos_site import Site, Step, chain_after, site, wait_for
from reclaimnet.apps.client import Gateway
from reclaimnet.errors import ReclaimNetError
from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.model.work import JobState

ROUNDS: Final = 200
QUICK_ROUNDS: Final = 6
FULL_S: Final = 900.0
"""No round begins later than this."""
QUICK_S: Final = 25.0
SHORT_S: Final = (0.1, 1.0)
LONG_S: Final = TIMING.given_up_after / SECOND + 1.5
"""Long enough for others to take over."""
LONG_SHARE: Final = 0.3
SECOND_FAULT: Final = 0.3
GRACE: Final = 1500 * MILLISECOND
RECOVER_S: Final = 60.0
"""So long a job may stand still once all is mended."""
SCHEDULED: Final = 250 * MILLISECOND
"""So late after the deadline a busy machine may give the minder its turn. Packets have no such
allowance: the kernel itself looks at the clock before it lets one go."""
END_S: Final = 60.0
FLAPS: Final = 4
FLAP_S: Final = 0.15
ALMOST_FULL: Final = (0, 4096, 65536)
PATIENCE_OF_PARTS_S: Final = 30.0

Mend = Callable[[], None]


class Chaos:
    """One campus and what is done to it. A fault returns how it is mended."""

    def __init__(self, place: Site, chance: random.Random) -> None:
        self.place = place
        self.chance = chance
        self.deadlines = 0
        self.missed: list[str] = []
        self.latest_ns = 0
        """How long after its deadline the last guest process was seen."""

    def faults(self) -> dict[str, Callable[[], Mend]]:
        several: dict[str, Callable[[], Mend]] = {
            "server_majority_lost": self._majority,
            "server_leader_cut_off": lambda: self.place.cut_routes([self.place.leader()]),
            "servers_apart": lambda: self.place.cut_routes(range(self.place.servers)),
        }
        several = several if self.place.servers > 1 else {}
        return several | {
            "agent_killed": self._agent_killed,
            "guard_killed": self._guard_killed,
            "gateway_killed": self._gateway_killed,
            "server_leader_killed": self._leader_killed,
            "link_down": self._link_down,
            "black_hole": self._black_hole,
            "flapping": self._flapping,
            "half_open": self._half_open,
            "disk_full": self._disk_full,
            "agent_frozen": self._frozen(lambda: self.place.agents[self._host()].pid),
            "guard_frozen": self._frozen(lambda: self.place.guards[self._host()].pid),
            "gateway_frozen": self._frozen(self.place.gateway_pid),
            "server_frozen": self._frozen(self._server_pid),
            "guest_frozen": self._frozen(self._guest_pid),
            "reclaimed": self._reclaimed(lambda host: None),
            "reclaimed_keepers_killed": self._reclaimed(self._kill_keepers),
            "reclaimed_keepers_frozen": self._reclaimed(self._freeze_keepers),
        }

    # --- the faults --------------------------------------------------------------------------

    def _host(self) -> str:
        return self.chance.choice(self.place.hosts)

    def _busy_host(self) -> str:
        busy = [host for host in self.place.hosts if self.place.guests(host)]
        return self.chance.choice(busy or self.place.hosts)

    def _agent_killed(self) -> Mend:
        host = self._busy_host()
        self.place.kill(self.place.agents[host].pid)
        self.place.agents[host].wait()
        return lambda: self.place.revive(host)

    def _guard_killed(self) -> Mend:
        host = self._busy_host()
        self.place.kill(self.place.guards[host].pid)
        self.place.guards[host].wait()
        return lambda: self.place.revive(host)

    def _gateway_killed(self) -> Mend:
        pid = self.place.gateway_pid()
        self.place.kill(pid)

        def mend() -> None:
            wait_for(lambda: self.place.gateway_pid() is None, PATIENCE_OF_PARTS_S)
            self.place.start_gateway()

        return mend

    def _leader_killed(self) -> Mend:
        rank = self.place.leader()
        self.place.kill(self._pid_of_server(rank))
        return lambda: self._await_server(rank)

    def _majority(self) -> Mend:
        """Frozen first, since the gateway would start them again at once."""
        first = self.place.leader()
        ranks = [first, (first + 1) % self.place.servers]
        pids = [self._pid_of_server(rank) for rank in ranks]
        for pid in pids:
            self.place.freeze(pid)

        def mend() -> None:
            for pid in pids:
                self.place.kill(pid)
            for rank in ranks:
                self._await_server(rank)

        return mend

    def _link_down(self) -> Mend:
        host = self._busy_host()
        self.place.link(host, up=False)
        return lambda: self.place.link(host, up=True)

    def _black_hole(self) -> Mend:
        host = self._busy_host()
        self.place.dark(host, on=True)
        return lambda: self.place.dark(host, on=False)

    def _flapping(self) -> Mend:
        host = self._busy_host()
        for _ in range(FLAPS):
            self.place.link(host, up=False)
            time.sleep(self.chance.uniform(0, FLAP_S))
            self.place.link(host, up=True)
            time.sleep(self.chance.uniform(0, FLAP_S))
        return lambda: None

    def _half_open(self) -> Mend:
        """One end dies in the dark: the other hears no goodbye."""
        host = self._busy_host()
        self.place.dark(host, on=True)
        if self.chance.random() < 0.5:
            self.place.kill(self.place.agents[host].pid)
            self.place.agents[host].wait()
        else:
            rank = self.chance.randrange(self.place.servers)
            self.place.kill(self._pid_of_server(rank))
            self._await_server(rank)

        def mend() -> None:
            self.place.dark(host, on=False)
            self.place.revive(host)

        return mend

    def _disk_full(self) -> Mend:
        host = self._busy_host()
        self.place.fill(host, self.chance.choice(ALMOST_FULL))
        return lambda: self.place.empty(host)

    def _frozen(self, who: Callable[[], int | None]) -> Callable[[], Mend]:
        def inject() -> Mend:
            pid = who()
            self.place.freeze(pid)
            return lambda: self.place.thaw(pid)

        return inject

    def _reclaimed(self, also: Callable[[str], None]) -> Callable[[], Mend]:
        def inject() -> Mend:
            host = self._busy_host()
            deadline = self.place.reclaim(host, GRACE)
            also(host)
            if deadline is not None:
                self._watch_deadline(host, deadline)

            def mend() -> None:
                self.place.thaw(self.place.guards[host].pid)
                self.place.thaw(self.place.agents[host].pid)
                self.place.revive(host)
                wait_for(lambda: self.place.lend(host), PATIENCE_OF_PARTS_S)

            return mend

        return inject

    def _kill_keepers(self, host: str) -> None:
        for process in (self.place.agents[host], self.place.guards[host]):
            self.place.kill(process.pid)
            process.wait()

    def _freeze_keepers(self, host: str) -> None:
        self.place.freeze(self.place.agents[host].pid)
        self.place.freeze(self.place.guards[host].pid)

    def _watch_deadline(self, host: str, deadline: int) -> None:
        """By what the kernel shows; steps and packets are looked at when all is over."""
        self.deadlines += 1
        time.sleep(max(0, deadline - time.time_ns()) / SECOND)
        seen = deadline
        while (now := time.time_ns()) < deadline + SECOND and self.place.guests(host):
            seen = now
        late = seen - deadline
        self.latest_ns = max(self.latest_ns, late)
        address = str(self.place.bed.hosts[host].address)
        packet = self.place.ear.last.get(address, 0) - deadline
        stepped = max((step.began for step in self._steps_on(host)), default=0) - deadline
        if late > SCHEDULED or packet > 0 or stepped > SCHEDULED:
            self.missed.append(
                f"{host}: process {late / SECOND:.3f} s, packet {packet / SECOND:.3f} s, "
                f"step {stepped / SECOND:.3f} s after the deadline"
            )

    def _steps_on(self, host: str) -> Iterable[Step]:
        return (s for name in self.place.jobs for s in self.place.steps(name) if s.host == host)

    def _pid_of_server(self, rank: int) -> int | None:
        server = self.place.server(rank)
        return None if server is None else server.pid

    def _server_pid(self) -> int | None:
        return self._pid_of_server(self.chance.randrange(self.place.servers))

    def _guest_pid(self) -> int | None:
        guests = self.place.guests(self._busy_host())
        return self.chance.choice(guests) if guests else None

    def _await_server(self, rank: int) -> None:
        """The gateway starts it again, if it lives."""
        if self.place.gateway_pid() is not None:
            wait_for(lambda: self.place.server(rank) is not None, PATIENCE_OF_PARTS_S)


def play(
    *,
    seed: int,
    rounds: int,
    budget_s: float,
    racks: tuple[int, ...],
    servers: int,
    jobs: int,
    tell: Callable[[str], None] = lambda _line: None,
) -> dict[str, Any]:
    """So many rounds, or as many as fit; what came of it."""
    chance = random.Random(seed)
    kinds: Counter[str] = Counter()
    stalls = 0
    played = 0
    with site(racks=racks, servers=servers, jobs=jobs) as place:
        chaos = Chaos(place, chance)
        faults = chaos.faults()
        began = time.monotonic()
        bag: list[str] = []
        while played < rounds and time.monotonic() - began < budget_s:
            # Each kind once before any comes again, in an order of the seed's.
            bag = bag or chance.sample(sorted(faults), len(faults))
            chosen = [bag.pop()]
            if chance.random() < SECOND_FAULT:
                chosen.append(chance.choice(sorted(set(faults) - set(chosen))))
            tell(f"round {played + 1}: {', '.join(chosen)}")
            kinds.update(chosen)
            mends = {kind: faults[kind]() for kind in chosen}
            time.sleep(LONG_S if chance.random() < LONG_SHARE else chance.uniform(*SHORT_S))
            for kind in sorted(chosen, key=_turn):
                mends[kind]()
            played += 1
            if not _all_go_on(place):
                stalls += 1
                tell(f"a job stands still after round {played}: {place.last_words()}")
        took = time.monotonic() - began
        ended = _end(place)
        histories = {name: place.steps(name) for name in place.jobs}
        return {
            "rounds": played,
            "jobs": jobs,
            "faults": kinds.total(),
            "faults_by_kind": dict(sorted(kinds.items())),
            "jobs_lost": sum(state is not JobState.COMPLETED for state in ended.values()),
            "histories_broken": sum(not whole(steps) for steps in histories.values()),
            "double_lives": sum(len(double_lives(steps)) for steps in histories.values()),
            "deadlines": chaos.deadlines,
            "deadlines_missed": len(chaos.missed),
            "missed": chaos.missed,
            "latest_process_ms": chaos.latest_ns / MILLISECOND,
            "stalls": stalls,
            "steps": sum(len(steps) for steps in histories.values()),
            "steps_taken_again": sum(
                len(steps) - len({s.number for s in steps}) for steps in histories.values()
            ),
            "attempts": sum(max(s.epoch for s in steps) for steps in histories.values()),
            "took_s": round(took, 1),
        }


def _turn(kind: str) -> int:
    """What is frozen may have to start others again; a gateway comes up only with its servers."""
    return 0 if kind.endswith("_frozen") else 2 if kind == "gateway_killed" else 1


def _all_go_on(place: Site) -> bool:
    """Whether each job takes a step from now on."""
    stood = {name: place.steps_taken(name) for name in place.jobs}
    return wait_for(lambda: all(place.steps_taken(n) > at for n, at in stood.items()), RECOVER_S)


def _end(place: Site) -> dict[str, JobState | None]:
    """Let all jobs come to their end, and see how they do."""
    (place.home / "stop").touch()
    states: dict[str, JobState] = {}

    def over() -> bool:
        try:
            gateway = Gateway(place.config)
            states.update({name: gateway.job(job).state for name, job in place.jobs.items()})
        except ReclaimNetError:
            return False
        return all(state.terminal for state in states.values())

    wait_for(over, END_S)
    return {name: states.get(name) for name in place.jobs}


def double_lives(steps: list[Step]) -> list[Step]:
    """Steps that an attempt began after a newer one had already taken one."""
    first: dict[int, int] = {}
    for step in steps:
        first[step.epoch] = min(step.written, first.get(step.epoch, step.written))
    return [
        step
        for step in steps
        if any(epoch > step.epoch and step.began > at for epoch, at in first.items())
    ]


def whole(steps: list[Step]) -> bool:
    """The history that counts, of each step what the newest attempt made of it, has no gap, and
    each step follows from the one before."""
    newest: dict[int, Step] = {}
    for step in steps:
        held = newest.get(step.number)
        if held is None or step.epoch >= held.epoch:
            newest[step.number] = step
    chain = ""
    for number in range(1, len(newest) + 1):
        if number not in newest:
            return False
        chain = chain_after(chain, number)
        if newest[number].chain != chain:
            return False
    return True


def run(*, seed: int, quick: bool) -> dict[str, Any]:
    def tell(line: str) -> None:
        if sys.stderr.isatty() or os.environ.get("RN_CHAOS_TELL"):
            sys.stderr.write(f"{line}\n")

    params: dict[str, Any] = {
        "rounds": QUICK_ROUNDS if quick else ROUNDS,
        "budget_s": QUICK_S if quick else FULL_S,
        "racks": (2, 1) if quick else (2, 2),
        "servers": 3,
        "jobs": 2,
    }
    commit = swarm.commit()
    result = play(seed=seed, tell=tell, **params)
    return {
        "bench": "chaos",
        "seed": seed,
        "params": {**params, "lease_s": TIMING.lease / SECOND, "commit": commit},
        "results": {"reclaimnet": result},
    }


def render(result: dict[str, Any]) -> None:
    from rich.table import Table

    row = result["results"]["reclaimnet"]
    table = Table(
        title=f"{row['rounds']} rounds, {row['faults']} faults, {row['steps']} steps of "
        f"{row['jobs']} jobs: {row['jobs_lost']} jobs lost, {row['double_lives']} double lives, "
        f"{row['deadlines_missed']} of {row['deadlines']} deadlines missed"
    )
    table.add_column("fault")
    table.add_column("times", justify="right")
    for kind, count in row["faults_by_kind"].items():
        table.add_row(kind.replace("_", " "), str(count))
    console = printing.console()
    console.print(table)
    for line in row["missed"]:
        console.print(line)
