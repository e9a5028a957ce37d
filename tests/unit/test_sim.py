"""The simulator: one ledger, the same bytes for the same seed, bad input refused in words."""

import contextlib
import gzip
import io
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from reclaimnet.apps.cli import run_command
from reclaimnet.apps.sim import AT_ONCE, JournalFile, scenario_of
from reclaimnet.engine.beats import EARLY_BEAT
from reclaimnet.engine.body import Body
from reclaimnet.engine.node import Node
from reclaimnet.engine.provider import Provider
from reclaimnet.errors import BadConfig
from reclaimnet.journal import told as as_told
from reclaimnet.model.events import (
    BeatAcked,
    BytesSent,
    Event,
    SendingEnded,
    SnapshotTaken,
    Woke,
)
from reclaimnet.model.market import Cause, JobId, NodeId
from reclaimnet.model.moving import TransferId
from reclaimnet.model.orders import Explain, HoldLease, Order, Warn
from reclaimnet.model.units import DAY, HOUR, MINUTE, SECOND
from reclaimnet.model.work import JobState
from reclaimnet.policy.suite import Suite
from reclaimnet.policy.topology import parse_topology
from reclaimnet.sim.baselines import CONTENDERS, endings, true_rates
from reclaimnet.sim.campus import MONDAY, PRESETS, campus
from reclaimnet.sim.kernel import Kernel
from reclaimnet.sim.ledger import CAUSES, Ledger
from reclaimnet.sim.links import Links
from reclaimnet.sim.replay import replay
from reclaimnet.sim.run import run
from reclaimnet.sim.scenario import Kind, foretold, played_out, unannounced
from reclaimnet.sim.sending import QUIET_EVERY, Sendings
from reclaimnet.sim.toml import read_scenario
from reclaimnet.sim.traces import Which, helios, spot
from reclaimnet.sim.world import REPLANS, SimWorld

TWO_NODES = """
days = 0.5
[[nodes]]
id = "a"
uplink = "1G"
notice = "60s"
[[nodes]]
id = "b"
uplink = "1G"
notice = "60s"
[[happenings]]
at = "1m"
node = "a"
kind = "lend"
[[happenings]]
at = "2h"
node = "b"
kind = "lend"
[[happenings]]
at = "3h"
node = "a"
kind = "reclaim"
[[jobs]]
at = "5m"
hours = 6
state = "1G"
"""


def test_a_reclaim_with_notice_costs_nothing_but_a_move() -> None:
    account = run(read_scenario(TWO_NODES, file="two.toml"), Suite()).account
    assert account.completed == 1
    assert account.work_lost_gpu_h == 0
    assert account.migrations == 1
    assert 0 < account.downtime_h < 1 / 60


def test_slurm_goes_back_to_the_last_checkpoint() -> None:
    account = CONTENDERS["slurm_requeue"](read_scenario(TWO_NODES, file="two.toml"), 0)
    assert account.completed == 1
    assert 0 < account.work_lost_gpu_h <= 0.6
    assert account.downtime_h > 121 / 3600


def test_a_slurm_job_that_saves_has_the_grace_and_the_wait_before_the_kill() -> None:
    """Ten seconds' notice: SIGTERM after 16 to 40 s, SIGKILL 30 s later."""
    jit = CONTENDERS["slurm_requeue_jit"]
    hasty = TWO_NODES.replace('notice = "60s"', 'notice = "10s"')
    for seed in range(5):
        fits = read_scenario(hasty.replace('state = "1G"', 'state = "4G"'), file="two.toml")
        assert jit(fits, seed).work_lost_gpu_h < 1 / 3600
        large = read_scenario(hasty.replace('state = "1G"', 'state = "12G"'), file="two.toml")
        assert jit(large, seed).work_lost_gpu_h > 0.01


def test_a_slurm_job_is_not_killed_for_a_place_it_has_left() -> None:
    crash = """[[happenings]]
at = "3h5m"
node = "a"
kind = "crash"
[[jobs]]"""
    text = TWO_NODES.replace('notice = "60s"', 'notice = "30m"').replace("[[jobs]]", crash)
    account = CONTENDERS["slurm_requeue"](read_scenario(text, file="two.toml"), 0)
    assert (account.migrations, account.deadline_misses, account.completed) == (1, 0, 1)


def test_the_same_seed_gives_the_same_bytes() -> None:
    def story() -> list[str]:
        lines: list[str] = []
        run(
            PRESETS["department"](4, DAY // 2),
            Suite(),
            journal=lambda *entry: lines.append(repr(entry)),
        )
        return lines

    assert story() == story()


@pytest.mark.parametrize("name", sorted(CONTENDERS))
def test_every_contender_accounts_for_all_of_the_time(name: str) -> None:
    scenario = PRESETS["department"](2, DAY)
    account = CONTENDERS[name](scenario, 0)
    assert account.useful_gpu_h > 0
    assert account.waste_gpu_h >= account.work_lost_gpu_h >= 0
    assert asdict(account) == asdict(CONTENDERS[name](scenario, 0))


@pytest.mark.parametrize(("preset", "seed"), [("department", 4), ("short_notice", 1)])
def test_what_a_mind_is_spared_would_have_changed_nothing(
    monkeypatch: pytest.MonkeyPatch, preset: str, seed: int
) -> None:
    """A sweep that is left out finds nothing to do, nobody wakes at another time for it, and what
    everybody should know is told no later."""
    spares = Node._spares
    spared: Counter[str] = Counter()

    def watched(mind: Node, event: Event, now: int) -> bool:
        answer = spares(mind, event, now)
        if answer and not isinstance(event, SnapshotTaken):
            swept = mind._sweep(now)
            assert not [order for order in swept if not isinstance(order, HoldLease)]
            assert not swept or isinstance(event, BeatAcked)
            # What the sweep has told is told again by what follows.
            mind.lease._all_told, mind.lease._held = None, {} if swept else mind.lease._held
            spared[type(event).__name__] += 1
        return answer

    class Watching(SimWorld):
        def deliver(self, node: NodeId, event: Event) -> None:
            super().deliver(node, event)
            machine = self.machines[node]
            mind = machine.mind
            if mind is None:
                return
            assert machine.due == mind.next_wake(), event
            seen = mind.beats.bytes_seen
            news = not mind.beats.all_is_told(mind.dispatcher, self.now)
            assert not news or mind.beats.next_at <= self.now + EARLY_BEAT, event
            mind.beats.bytes_seen = seen

    monkeypatch.setattr(Node, "_spares", watched)
    monkeypatch.setattr("reclaimnet.sim.run.SimWorld", Watching)
    run(PRESETS[preset](seed, DAY), Suite())
    assert len(spared) >= 11, spared


def test_a_mind_may_find_more_to_do_when_it_wakes_but_must_sleep_some_time() -> None:
    class Restless:
        """Has something to do at once, so many times."""

        stirred = True
        provider = Provider(NodeId("a"))

        def __init__(self, times: int) -> None:
            self.times = times

        def handle(self, event: Event, now: int) -> list[Order]:
            self.times -= isinstance(event, Woke)
            return []

        def next_wake(self) -> int | None:
            return 0 if self.times > 0 else None

    def wake(times: int) -> int:
        world = SimWorld(seed=0, suite=Suite(), start=HOUR)
        world.add_node(Body(node=NodeId("a"), provider="ada", uplink_bps=1, shelf_bytes=0))
        mind = Restless(times)
        world.machines[NodeId("a")].mind = mind  # type: ignore[assignment]
        world.deliver(NodeId("a"), Woke())
        world.run(2 * HOUR)
        return mind.times

    assert wake(3) == 0
    with pytest.raises(AssertionError, match="left undone"):
        wake(1_000_000)


def test_others_worlds_have_the_same_endings() -> None:
    scenario = PRESETS["department"](1, 3 * DAY)
    ends = {node: set(times) for node, times in endings(scenario).items()}
    for other in (unannounced(scenario), foretold(scenario)):
        assert {node: set(times) for node, times in endings(other).items()} == ends
    assert all(h.kind != Kind.CRASH for h in foretold(scenario).happenings)


def test_a_surprise_stays_one_to_whoever_hears_of_all_other_endings_ahead() -> None:
    scenario = PRESETS["campus54"](0, 2 * DAY)
    surprises = [h for h in scenario.happenings if h.kind != Kind.LEND and h.grace == 0]
    told = foretold(scenario, surprises=True)
    assert surprises
    assert [h for h in told.happenings if h.kind != Kind.LEND and h.grace == 0] == surprises
    known = endings(scenario, surprises=False)
    assert all(h.at not in known.get(h.node, ()) for h in surprises)
    rates = true_rates(scenario)
    assert 0 < rates.promised_per_h < rates.unpromised_per_h


class Highway:
    """Two links of one building, and what their senders hear."""

    def __init__(self) -> None:
        self.kernel = Kernel()
        self.told: list[tuple[NodeId, Event]] = []
        self.pressing: set[JobId] = set()
        self.links = Links(
            self.kernel,
            path=lambda source, target: ((f"{source} up", 2.0), (f"{target} down", 2.0)),
        )
        self.sendings = Sendings(
            self.kernel,
            self.links,
            quiet=True,
            tell=lambda node, event: self.told.append((node, event)),
            presses=lambda node, job: job in self.pressing,
        )

    def send(self, name: str, source: str, target: str) -> None:
        id_, job = TransferId(name), JobId(name)
        flow = self.links.start(
            NodeId(source), NodeId(target), 100, lambda: self.sendings.ended(id_)
        )
        self.sendings.began(
            id_,
            flow,
            source=NodeId(source),
            target=NodeId(target),
            job=job,
            size=100,
        )

    def heard_of(self) -> set[str]:
        return {event.transfer for _, event in self.told if isinstance(event, BytesSent)}


def test_in_a_quiet_world_only_what_presses_and_what_is_in_its_way_is_told_of() -> None:
    road = Highway()
    road.send("copy", "a", "b")
    road.send("far copy", "c", "d")
    assert road.told == []
    road.pressing.add(JobId("move"))
    road.send("move", "a", "e")
    assert road.heard_of() == {"copy", "move"}
    road.send("late copy", "f", "e")
    assert road.heard_of() == {"copy", "move", "late copy"}
    before = len(road.told)
    road.kernel.run(2 * QUIET_EVERY)
    assert len(road.told) == before + 2 * 3, "each is looked at twice"
    road.kernel.run(300 * SECOND)
    ended = {event.transfer for _, event in road.told if isinstance(event, SendingEnded)}
    assert ended == {"copy", "move", "late copy"}


def test_what_has_its_way_for_itself_is_not_looked_at_until_that_changes() -> None:
    def rested() -> Highway:
        road = Highway()
        road.pressing.add(JobId("move"))
        road.send("move", "a", "e")
        road.kernel.run(QUIET_EVERY)
        assert len(road.told) == 2, "when it began, and once more"
        road.kernel.run(25 * SECOND)
        assert len(road.told) == 2
        assert road.sendings.resting == {"a"}
        return road

    road = rested()
    road.send("far copy", "c", "d")
    assert road.sendings.resting == {"a"}
    road.send("copy", "f", "e")
    looks = [event for _, event in road.told[2:] if isinstance(event, BytesSent)]
    assert [(look.transfer, look.left) for look in looks] == [("move", 50), ("copy", 100)]
    assert not road.sendings.resting
    road.kernel.run(25 * SECOND + QUIET_EVERY)
    assert len(road.told) == 2 + 2 + 2, "both are looked at again"

    road = rested()
    road.sendings.set_pace(TransferId("move"), 1.0)
    assert len(road.told) == 3
    assert not road.sendings.resting

    road = rested()
    road.sendings.refresh(NodeId("a"))
    assert [e.more for _, e in road.told if isinstance(e, BytesSent)] == [False, False, True]
    road.kernel.run(60 * SECOND)
    assert isinstance(road.told[-1][1], SendingEnded)
    assert not road.sendings.resting


def test_who_plans_knows_how_far_its_transfers_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    rested = 0

    class Watching(SimWorld):
        def deliver(self, node: NodeId, event: Event) -> None:
            nonlocal rested
            rested += node in self.transfers.sendings.resting
            super().deliver(node, event)
            mind = self.machines[node].mind
            if mind is not None and type(event) in REPLANS:
                for going in mind.concert.outbound._going.values():
                    seen_at = going.transfer.seen_at
                    assert seen_at is not None
                    assert self.now - seen_at <= QUIET_EVERY

    monkeypatch.setattr("reclaimnet.sim.run.SimWorld", Watching)
    run(PRESETS["short_notice"](3, DAY), Suite())
    assert rested > 100


def test_a_copy_is_told_of_once_its_owner_wants_the_machine_back() -> None:
    road = Highway()
    road.send("copy", "a", "b")
    road.sendings.warned(NodeId("a"))
    assert road.told == []
    road.pressing.add(JobId("copy"))
    road.sendings.warned(NodeId("a"))
    assert road.heard_of() == {"copy"}


def test_the_ledger_counts_what_is_done_twice_and_what_stands_still() -> None:
    ledger, job = Ledger(), JobId("j")
    ledger.submitted(job, gpus=2, step_s=1.0)
    ledger.bound(NodeId("a"), job, 2.0, 0)
    ledger.ran(NodeId("a"), job, 0, 10 * SECOND)
    ledger.paused(NodeId("a"), job, SECOND)
    ledger.stopped(NodeId("a"), job, 100, 110 * SECOND)
    ledger.freed(NodeId("a"), job, 110 * SECOND)
    ledger.bound(NodeId("b"), job, 2.0, 130 * SECOND)
    ledger.ran(NodeId("b"), job, 60, 140 * SECOND)
    ledger.stopped(NodeId("b"), job, 160, 240 * SECOND)
    ledger.ended(job)
    ledger.freed(NodeId("b"), job, 240 * SECOND)
    account = ledger.close({job: 160}, 300 * SECOND)
    assert account.work_lost_gpu_h == pytest.approx(40 * 2 / 3600)
    assert account.downtime_h == pytest.approx(30 / 3600)
    assert account.unplaced_h == pytest.approx(20 / 3600)
    assert account.waste_gpu_h == pytest.approx((110 + 110 - 160) * 2 / 3600)
    assert account.first_start_gpu_h == pytest.approx(10 * 2 / 3600)
    assert account.restart_gpu_h == pytest.approx(10 * 2 / 3600)
    assert account.saving_gpu_h == pytest.approx(2 / 3600)
    told = asdict(account)
    assert account.waste_gpu_h == pytest.approx(sum(told[key] for key in CAUSES.values()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("days = 0.5", "dais = 1"), "two.toml:2: unknown key 'dais'"),
        (("days = 0.5", 'days = "all"'), "two.toml:2: days = 'all'; expected a number"),
        (('uplink = "1G"', 'uplink = "0"'), "two.toml:5: node 1: uplink is zero"),
        (('notice = "60s"', 'notise = "60s"'), "two.toml:6: node 1: unknown key 'notise'"),
        (('id = "b"', 'id = "a"'), "two.toml:8: node 2: there is a node 'a' already"),
        (('kind = "lend"', 'kind = "steal"'), "two.toml:14: happening 1: kind = 'steal'"),
        (('node = "a"', 'node = "z"'), "two.toml:13: happening 1: no node 'z'"),
        (('at = "1m"', 'at = "soon"'), "two.toml:12: happening 1: at:"),
        (("hours = 6", "hours = 6\ngpus = 9"), "two.toml:26: job 1: 9 GPUs on one node"),
        (("hours = 6", ""), "two.toml:23: job 1: hours is missing"),
        (('state = "1G"', 'state = "much"'), "two.toml:26: job 1: state:"),
        (("days = 0.5", "days = [[["), "two.toml:3"),
        (("days = 0.5", "days = 1\nseed = 1.5"), "two.toml:3: seed = 1.5; expected a whole number"),
        (
            ('notice = "60s"', 'hours = ["at night"]'),
            "two.toml:6: node 1: hours: 'at night' are no hours; expected days and a span",
        ),
        (('notice = "60s"', 'hours = "18:00-08:00"'), "two.toml:6: node 1: hours = '18:00-08:00'"),
        (
            ('notice = "60s"', 'maintenance = ["30h"]'),
            "two.toml:6: node 1: maintenance: '30h' is no span of time; expected FROM/TO",
        ),
        (('notice = "60s"', 'maintenance = ["3h/2h"]'), "'3h/2h' ends before it begins"),
        (('notice = "60s"', 'nat = "yes"'), "two.toml:6: node 1: nat = 'yes'; expected true or"),
        (("[[jobs]]", "[jobs]"), "two.toml:23: jobs is no list; expected [[jobs]]"),
    ],
)
def test_a_wrong_scenario_is_refused_in_words(change: tuple[str, str], said: str) -> None:
    with pytest.raises(BadConfig, match=r"two\.toml") as error:
        read_scenario(TWO_NODES.replace(*change, 1), file="two.toml")
    assert said in str(error.value)


def test_a_scenario_may_bring_its_own_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "two.toml"
    file.write_text("seed = 5\n" + TWO_NODES)
    assert scenario_of(file, preset="campus54", seed=0, days=1).seed == 5
    monkeypatch.chdir(tmp_path)
    seeds = []
    for option in ([], ["--seed", "9"]):
        assert run_command(["sim", str(file), "--json", *option]) == 0
        seeds.append(json.loads(capsys.readouterr().out)["seed"])
    assert seeds == [5, 9]


def test_a_campus_of_one_is_impossible() -> None:
    with pytest.raises(BadConfig, match="another one"):
        campus(name="lonely", seed=0, until=DAY, machines=1)


def owner_file(folder: Path, rows: list[str]) -> Path:
    path = folder / "lab.csv.gz"
    head = "time,total_gpus,running_gpus,pending_gpus,idle_gpus"
    with gzip.open(path, "wt") as stream:
        stream.write("\n".join([head, *rows]) + "\n")
    return path


def test_a_fall_of_idle_nodes_is_a_reclaim_of_the_one_the_rule_says(tmp_path: Path) -> None:
    idle = [0, 8, 16, 16, 8, 8, 0, 0]
    owner_file(tmp_path, [f"2020-05-01 00:{i:02d}:00,64,0,0,{n}" for i, n in enumerate(idle)])
    first = {}
    for which in (Which.LIFO, Which.FIFO):
        happenings = helios(tmp_path, seed=0, which=which).happenings
        assert sum(h.kind == Kind.LEND for h in happenings) == 2
        first[which] = next(h.node for h in happenings if h.kind == Kind.RECLAIM)
    assert first == {Which.LIFO: "lab-01", Which.FIFO: "lab-00"}


def test_who_is_taken_back_first_can_be_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = tmp_path / "lab"
    lab.mkdir()
    owner_file(lab, [f"2020-05-01 00:{minute:02d}:00,64,0,0,16" for minute in range(8)])
    monkeypatch.chdir(tmp_path)
    assert run_command(["sim", str(lab), "--json", "--reclaims", "fifo"]) == 0
    assert json.loads(capsys.readouterr().out)["scenario"] == "lab fifo"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("2020-05-01 00:09:00,64,0,0", "4 cells; expected 5"),
        ("yesterday,64,0,0,8", "Invalid isoformat string"),
        ("2020-05-01 00:09:00,64,0,0,-8", "expected 0 or more"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path: Path, row: str, said: str) -> None:
    owner_file(tmp_path, ["2020-05-01 00:00:00,64,0,0,16", row])
    with pytest.raises(BadConfig, match=r"lab\.csv\.gz:3") as error:
        helios(tmp_path, seed=0, which=Which.LIFO)
    assert said in str(error.value)


def test_a_journal_is_replayed_with_the_same_loans_and_jobs(tmp_path: Path) -> None:
    scenario = read_scenario(TWO_NODES, file="two.toml")
    path = tmp_path / "journal.jsonl"
    with path.open("w") as file:

        def write(now: int, node: NodeId, event: Event, orders: Sequence[Order]) -> None:
            for entry in as_told(now, node, event, orders):
                file.write(json.dumps(entry) + "\n")

        run(scenario, Suite(), journal=write)
    again = replay(path)
    assert again.happenings == scenario.happenings
    assert [node.id for node in again.nodes] == ["a", "b"]
    [job] = again.jobs
    assert job.state_bytes == scenario.jobs[0].state_bytes
    assert job.seconds == pytest.approx(scenario.jobs[0].seconds, rel=0.01)
    assert run(again, Suite()).account.completed == 1
    with path.open("a") as file:
        file.write('{"at": 1, "event": {}}\n')
    line = len(path.read_text().splitlines())
    with pytest.raises(
        BadConfig, match=rf"journal\.jsonl:{line}: .*no entry of a journal.*no .node"
    ):
        replay(path)


def test_a_journal_in_a_file_has_all_that_was_told_also_of_a_run_that_failed() -> None:
    def journalled(most: int) -> tuple[bytes, list[Any]]:
        file = io.BytesIO()
        told: list[Any] = []

        def note(now: int, node: NodeId, event: Event, orders: Sequence[Order]) -> None:
            told.extend(as_told(now, node, event, orders))
            journal.note(now, node, event, orders)
            if len(told) >= most:
                raise ZeroDivisionError

        with contextlib.suppress(ZeroDivisionError), JournalFile(file) as journal:
            run(PRESETS["department"](4, DAY // 2), Suite(), journal=note)
        return file.getvalue(), told

    for most in (10, AT_ONCE, sys.maxsize):
        lines, told = journalled(most)
        assert [json.loads(line) for line in lines.splitlines()] == json.loads(json.dumps(told))
        assert lines == journalled(most)[0]


def test_submissions_come_to_the_campus_of_the_preset(tmp_path: Path) -> None:
    """As `rn sim --trace philly-jobs.csv.gz` reads them."""
    path = tmp_path / "jobs.csv.gz"
    head = "timestamp,duration,num_gpus,gpu_time,cluster"
    rows = [
        "2017-10-03 00:10:00,30.0,1,30.0,a",
        "2017-10-03 00:00:00,7200.0,1,7200.0,a",
        "2017-10-03 01:00:00,3600.0,64,230400.0,a",
        "2017-10-05 00:00:00,3600.0,1,3600.0,a",
        "2017-10-03 02:00:00,3600.0,1,3600.0,b",
    ]
    with gzip.open(path, "wt") as stream:
        stream.write("\n".join([head, *rows]) + "\n")
    scenario = scenario_of(path, preset="department", seed=0, days=1.0)
    hours = [(job.submitted_at - scenario.start) / HOUR for job in scenario.jobs]
    assert hours == [0, 2], "too short, too wide and too late are left out"
    assert [job.seconds for job in scenario.jobs] == [7200, 3600]
    assert run(scenario, Suite()).account.completed == 2
    with gzip.open(path, "at") as stream:
        stream.write("2017-10-03 03:00:00,soon,1,0,a\n")
    with pytest.raises(BadConfig, match=r"jobs\.csv\.gz:7: .*expected an ISO time"):
        scenario_of(path, preset="department", seed=0, days=3.0)


def test_submissions_begin_where_the_trace_does_in_earnest(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv.gz"
    rows = [f"2017-10-03 {hour:02}:00:00,600.0,1,600.0,a" for hour in range(24)]
    with gzip.open(path, "wt") as stream:
        head = "timestamp,duration,num_gpus,gpu_time,cluster"
        stream.write("\n".join([head, "2017-09-01 05:00:00,900.0,1,900.0,a", *rows]) + "\n")
    scenario = scenario_of(path, preset="department", seed=0, days=1.0)
    assert len(scenario.jobs) == 24
    assert scenario.jobs[0].submitted_at == scenario.start


def test_spot_traces(tmp_path: Path) -> None:
    path = tmp_path / "spot.csv"
    path.write_text("0,add,x\n1000,add,y\n7200000,remove,x\n9000000,add,x\n")
    assert [h.kind for h in spot(path, seed=0).happenings] == ["lend", "lend", "reclaim", "lend"]
    path.write_text("0,add,x\n5,vanish,x\n")
    with pytest.raises(BadConfig, match=r"spot\.csv:2.*expected milliseconds"):
        spot(path, seed=0)


def test_a_plan_of_the_campus_gives_paths_and_names_what_is_impossible() -> None:
    text = """
    [buildings.b0]
    uplink = "10G"
    [buildings.b1]
    uplink = "2G"
    [nodes.a]
    building = "b0"
    uplink = "10G"
    [nodes.b]
    building = "b1"
    uplink = "5G"
    [nodes.c]
    building = "b1"
    uplink = "1G"
    nat = true
    """
    plan = parse_topology(text, file="plan.toml")
    a, b, c = NodeId("a"), NodeId("b"), NodeId("c")
    assert plan.rate_bps(a, b) == 250_000_000
    assert plan.rate_bps(b, c) == 125_000_000
    assert plan.rate_bps(c, a) == 0
    assert plan.rate_bps(c, b) == 125_000_000
    with pytest.raises(BadConfig, match="has no link"):
        parse_topology(text.replace('"b1"', '"b9"', 1), file="plan.toml")


def test_the_preset_is_a_campus_of_54() -> None:
    scenario = PRESETS["campus54"](0, 6 * HOUR)
    assert len(scenario.nodes) == 54
    assert scenario.until - scenario.start == 6 * HOUR
    assert all(h.grace >= 0 and h.at >= scenario.start for h in scenario.happenings)
    assert all(h.repair >= 5 * MINUTE for h in scenario.happenings if h.kind == Kind.CRASH)


KEEPS_HOURS = TWO_NODES.replace(
    'id = "a"', 'id = "a"\nhours = ["mon-sun 18:00-08:00"]\nmaintenance = ["2h/5h"]', 1
).replace('at = "2h"', 'at = "1h"', 1)


def test_guests_leave_before_a_declared_maintenance_begins() -> None:
    warned: list[tuple[int, int, Cause]] = []

    def look(now: int, node: NodeId, event: Event, orders: Sequence[Order]) -> None:
        notices = [order.notice for order in orders if isinstance(order, Warn) and order.notice]
        warned.extend((now - MONDAY, n.deadline - MONDAY, n.cause) for n in notices)

    account = run(read_scenario(KEEPS_HOURS, file="two.toml"), Suite(), journal=look).account
    assert warned == [(2 * HOUR - MINUTE, 2 * HOUR, Cause.HOURS)]
    assert (account.completed, account.migrations, account.work_lost_gpu_h) == (1, 1, 0)


def test_a_declared_calendar_is_played_out_for_whoever_keeps_none() -> None:
    text = KEEPS_HOURS.replace("days = 0.5", "days = 2")
    played = played_out(read_scenario(text, file="two.toml"))
    assert not any(node.terms.declared for node in played.nodes)
    # What is asked back at 3 h is not lent at that time, so the loan stands.
    assert [
        ((h.at - MONDAY) // MINUTE, str(h.kind), h.grace // MINUTE)
        for h in played.happenings
        if h.node == "a"
    ] == [
        (1, "lend", 0),
        (119, "reclaim", 1),
        (5 * 60, "lend", 0),
        (8 * 60 - 1, "reclaim", 1),
        (18 * 60, "lend", 0),
        (32 * 60 - 1, "reclaim", 1),
        (42 * 60, "lend", 0),
    ]
    account = CONTENDERS["slurm_requeue"](played, 0)
    assert account.completed == 1
    assert account.work_lost_gpu_h > 0


BEHIND_NAT = """
days = 0.5
[buildings.north]
uplink = "10G"
[buildings.south]
uplink = "10G"
[[nodes]]
id = "a"
building = "north"
uplink = "1G"
nat = true
[[nodes]]
id = "b"
building = "south"
uplink = "10G"
[[nodes]]
id = "c"
building = "north"
uplink = "1G"
[[happenings]]
at = "1m"
node = "a"
kind = "lend"
[[happenings]]
at = "1h"
node = "b"
kind = "lend"
[[happenings]]
at = "1h"
node = "c"
kind = "lend"
[[happenings]]
at = "3h"
node = "a"
kind = "reclaim"
[[jobs]]
id = "job"
at = "5m"
hours = 4
state = "1G"
"""


def test_a_job_behind_nat_leaves_its_state_where_that_can_be_fetched() -> None:
    """North has one more node; south cannot fetch anything from behind north's NAT."""
    reasons: set[str] = set()

    def look(now: int, node: NodeId, event: Event, orders: Sequence[Order]) -> None:
        for order in orders:
            if isinstance(order, Explain):
                reasons.update(order.decision.refused)

    result = run(read_scenario(BEHIND_NAT, file="nat.toml"), Suite(), journal=look)
    record = result.world.store.records[JobId("job")]
    assert "b: cannot fetch anything from where the job runs" in reasons
    assert (record.moves, record.steps_lost, record.state) == (1, 0, JobState.COMPLETED)
    assert result.account.work_lost_gpu_h == 0


def test_a_job_whose_state_nobody_can_fetch_does_not_wait_for_ever() -> None:
    alone = BEHIND_NAT.replace('id = "c"\nbuilding = "north"', 'id = "c"\nbuilding = "south"')
    result = run(read_scenario(alone, file="nat.toml"), Suite())
    assert result.account.work_lost_gpu_h == pytest.approx(3, abs=0.1)
    assert result.account.completed == 1
