"""`rn watch` and `rn rehearse`: what is shown at any width, and what is said beforehand."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from reclaimnet.apps import rehearse, watch
from reclaimnet.apps.cli_tables import job_table, reason_of
from reclaimnet.apps.client import Node
from reclaimnet.errors import UsageError
from reclaimnet.model.asking import LendRequest, ReclaimRequest, Reply, Request
from reclaimnet.model.hours import parse_hours
from reclaimnet.model.market import Card, Gpu, GpuId, JobId, NodeId, Progress, Terms
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import Checkpoint, JobRecord, JobSpec, JobState, ManifestId

LAB, OFFICE = NodeId("lab"), NodeId("office")
GPUS = tuple(Gpu(id=GpuId(f"G{i}"), index=i) for i in range(2))
NOW = 1000 * SECOND
JOB = JobRecord(
    id=JobId("j-abcdef"),
    spec=JobSpec(name="train", user="ada", command=("x",)),
    submitted_at=0,
    state=JobState.MIGRATING,
    reason="reclaim (a talk)",
    epoch=1,
    holder=LAB,
    handover_to=OFFICE,
    leave_by=NOW + 12 * SECOND,
    step=7,
    checkpoints=(
        Checkpoint(
            manifest=ManifestId("m"), epoch=1, step=7, size=3 << 20, taken_at=0, holders=(LAB,)
        ),
    ),
)
NODES = [
    Node(
        card=Card(
            node=LAB,
            provider="ada",
            gpus=GPUS,
            leaving=(GPUS[0].id,),
            vacant=(GPUS[1].id,),
            deadline=NOW + 12 * SECOND,
            jobs=(Progress(job=JOB.id, epoch=1, step=7, at=None, gpus=(GPUS[0].id,)),),
        ),
        state="DRAINING",
    ),
    Node(card=Card(node=OFFICE, gpus=GPUS, vacant=(GPUS[0].id,)), state="MIXED"),
]


@pytest.mark.parametrize("width", [80, 200])
def test_a_reclaim_can_be_watched(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(watch.picture([JOB], NODES, now=NOW))
    shown = console.file.getvalue()
    assert max(len(line) for line in shown.splitlines()) <= width
    assert "lab is taken back, 1 of 2 GPUs: 12s left" in shown
    assert "train → office  3.0 MiB" in shown
    assert "▒□" in shown


def test_piped_it_says_only_what_changes() -> None:
    running = replace(JOB, state=JobState.RUNNING, holder=OFFICE, reason="")
    assert watch.changes([JOB], [JOB], NODES, NODES) == []
    back = [replace(NODES[0], state="RECLAIMED"), NODES[1]]
    assert watch.changes([JOB], [running], NODES, back) == [
        "train (j-abcdef) is RUNNING on office",
        "lab is RECLAIMED",
    ]


def test_the_time_a_job_has_left_is_counted_when_it_is_shown() -> None:
    assert reason_of(JOB, NOW) == "12s left: reclaim (a talk)"
    assert reason_of(JOB, NOW + 9 * SECOND) == "3s left: reclaim (a talk)"
    assert reason_of(JOB, NOW + 13 * SECOND) == "late: reclaim (a talk)"
    there = replace(JOB, state=JobState.RUNNING, reason="")
    assert reason_of(there, NOW) == "-"
    assert "12s left" in job_table([JOB], now=NOW, width=80)[1]


def test_a_rehearsal_says_beforehand_what_it_will_do() -> None:
    lab = Node(card=replace(NODES[0].card, leaving=(), terms=Terms(notice=20 * SECOND)))
    job = replace(JOB, state=JobState.RUNNING)
    plan = rehearse.Plan(job=job, node=lab, gpus=("G0",), notice=20 * SECOND, elsewhere=("office",))
    text = "\n".join(rehearse.lines(plan))
    for word in ("train", "lab", "office", "20s", "3.0 MiB"):
        assert word in text
    assert text.endswith(
        "lab lends the GPU again as soon as the job runs elsewhere or has ended, at the latest "
        "1m00s after the notice has run out"
    )
    never = replace(plan, job=replace(job, checkpoints=()))
    assert "IT STARTS ANEW" in "\n".join(rehearse.lines(never))
    alone = "\n".join(rehearse.lines(replace(plan, elsewhere=())))
    assert "no other node has room" in alone


def test_a_rehearsal_tells_what_it_cost() -> None:
    outcome = rehearse.Outcome(
        job="j",
        name="train",
        source="lab",
        moved=True,
        destination="office",
        state=JobState.RUNNING,
        steps_lost=0,
        downtime_s=0.5,
        took_s=3.0,
        notice_s=20.0,
        lent_again=True,
    )
    said = rehearse.verdict(outcome)
    assert said == (
        "train moved from lab to office: no step lost. Its process was up there 3s after the "
        "notice; it took no step for 500ms."
    )
    anew = rehearse.verdict(replace(outcome, all_lost=True, downtime_s=None))
    assert "all it had done is lost, since it was never saved" in anew
    assert "no step lost" not in anew
    assert "later than the deadline" in rehearse.verdict(replace(outcome, took_s=21.0))
    assert "no other place" in rehearse.verdict(replace(outcome, moved=False, destination=None))


class Stage:
    """A campus on which the job moves at once, and an owner who may have the last word."""

    def __init__(
        self,
        node: Node,
        refusals: int = 0,
        seen: tuple[JobRecord, ...] = (
            replace(JOB, state=JobState.COMPLETED, epoch=2, holder=OFFICE),
        ),
    ) -> None:
        self.node = node
        self.refusals = refusals
        self.seen = list(seen)
        """How the job is at one look after the other; it stays as it was at the last."""
        self.asked: list[Request] = []

    def ask(self, node: str, request: Request) -> Reply:
        self.asked.append(request)
        if isinstance(request, ReclaimRequest):
            left = tuple(gpu for gpu in self.node.card.gpus if gpu.id not in request.gpus)
            self.node = replace(self.node, card=replace(self.node.card, gpus=left))
            return Reply(ok=True, text="taken back", said_at=77)
        if self.refusals:
            self.refusals -= 1
            raise UsageError("its owner has said something else since")
        return Reply(ok=True, text="lent")

    def job(self, job: str) -> JobRecord:
        return self.seen.pop(0) if len(self.seen) > 1 else self.seen[0]

    def nodes(self) -> list[Node]:
        return [self.node]


@pytest.mark.parametrize(("refusals", "lent"), [(0, True), (1, True), (10**6, False)])
def test_after_a_rehearsal_the_same_is_lent_unless_the_owner_has_spoken(
    monkeypatch: pytest.MonkeyPatch, refusals: int, lent: bool
) -> None:
    """The owner had taken the first GPU back, and lends the second to one person at some hours."""
    monkeypatch.setattr(rehearse, "LEND_PAUSE_S", 0.0)
    monkeypatch.setattr(rehearse, "COUNT_S", 0.0)
    hours = parse_hours("mon-fri 18:00-08:00")
    terms = Terms(notice=9 * SECOND, users=("ada",), hours=hours, utc_offset=SECOND)
    lab = Node(card=Card(node=LAB, gpus=GPUS[1:], terms=terms))
    job = replace(JOB, state=JobState.RUNNING)
    plan = rehearse.Plan(job=job, node=lab, gpus=(GPUS[1].id,), notice=SECOND, elsewhere=())
    stage = Stage(lab, refusals)
    assert rehearse.run(stage, plan, lambda record, share: None, silent).lent_again is lent
    assert len(stage.asked) <= 2 + rehearse.REFUSALS
    assert stage.asked[-1] == LendRequest(
        which=(GPUS[1].id,),
        notice=9 * SECOND,
        users=("ada",),
        hours=hours,
        utc_offset=SECOND,
        maintenance=(),
        as_of=77,
    )


def silent(text: str) -> None:
    raise AssertionError(f"nobody has interrupted, but this was said: {text}")


class Clock:
    """Time passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


HERE = replace(
    JOB, state=JobState.RUNNING, reason="", handover_to=None, leave_by=None, last_step_at=NOW
)
THERE = replace(HERE, epoch=2, holder=OFFICE, moves=1)
STARTS = replace(THERE, state=JobState.CONFIGURING)
ON = replace(THERE, epoch=3, holder=NodeId("attic"), moves=2, downtime=SECOND)
WAITS = replace(HERE, state=JobState.PENDING, holder=None)


def ended(record: JobRecord, state: JobState) -> JobRecord:
    """Nobody holds a job that has ended."""
    return replace(record, state=state, holder=None, ended_at=NOW)


def rehearsed(monkeypatch: pytest.MonkeyPatch, *seen: JobRecord) -> tuple[rehearse.Outcome, Stage]:
    monkeypatch.setattr(rehearse, "time", Clock())
    lab = Node(card=Card(node=LAB, gpus=GPUS[:1]))
    gpus = (GPUS[0].id,)
    plan = rehearse.Plan(job=HERE, node=lab, gpus=gpus, notice=15 * SECOND, elsewhere=("office",))
    stage = Stage(lab, seen=seen)
    return rehearse.run(stage, plan, lambda record, share: None, silent), stage


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ((JOB, THERE, THERE), ""),
        ((JOB, THERE, ended(THERE, JobState.COMPLETED)), "It has completed since."),
        ((JOB, STARTS, ended(THERE, JobState.COMPLETED)), "It has completed since."),
        ((JOB, THERE, ended(THERE, JobState.CANCELLED)), "It has been cancelled since."),
        ((JOB, THERE, ON), "It has moved on since, which is counted, too."),
        (
            (JOB, THERE, ended(ON, JobState.COMPLETED)),
            "It has moved on since, which is counted, too. It has completed since.",
        ),
    ],
)
def test_a_job_that_moved_has_moved_whatever_became_of_it_since(
    monkeypatch: pytest.MonkeyPatch, seen: tuple[JobRecord, ...], said: str
) -> None:
    outcome, _ = rehearsed(monkeypatch, *seen)
    assert (outcome.destination, outcome.steps_lost) == (OFFICE, 0)
    verdict = rehearse.verdict(outcome)
    assert verdict.startswith("train moved from lab to office: no step lost. ")
    assert verdict.endswith(said)
    assert rehearse.exit_code(outcome) == 0


def test_a_job_that_fails_after_its_move_is_no_good_rehearsal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcome, _ = rehearsed(monkeypatch, JOB, THERE, ended(THERE, JobState.FAILED))
    assert "moved from lab to office" in rehearse.verdict(outcome)
    assert "It has failed since; `rn why j-abcdef` tells why." in rehearse.verdict(outcome)
    assert rehearse.exit_code(outcome) == 75


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (ended(HERE, JobState.COMPLETED), "has completed"),
        (ended(HERE, JobState.CANCELLED), "has been cancelled"),
        (ended(THERE, JobState.FAILED), "has failed"),
    ],
)
def test_a_job_that_ended_before_it_ran_elsewhere_has_not_moved(
    monkeypatch: pytest.MonkeyPatch, last: JobRecord, said: str
) -> None:
    outcome, _ = rehearsed(monkeypatch, JOB, last)
    assert outcome.destination is None
    assert rehearse.verdict(outcome) == f"train {said} before it was seen running elsewhere."
    assert rehearse.exit_code(outcome) == 75


def test_a_job_that_was_seen_nowhere_else_but_completed_there_has_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcome, _ = rehearsed(monkeypatch, JOB, ended(THERE, JobState.COMPLETED))
    assert rehearse.verdict(outcome).startswith("train moved from lab: no step lost. ")
    assert rehearse.exit_code(outcome) == 0


def test_what_a_job_left_is_lent_again_even_if_it_found_no_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcome, stage = rehearsed(monkeypatch, JOB, WAITS)
    assert "found no other place" in rehearse.verdict(outcome)
    assert isinstance(stage.asked[-1], LendRequest)
    assert outcome.lent_again
    assert rehearse.exit_code(outcome) == 75


def test_the_gpu_is_lent_again_before_the_standstill_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner's GPU does not lie idle while we wait for the job's next save."""
    lent_at: list[float] = []
    clock = Clock()

    class Watched(Stage):
        def ask(self, node: str, request: Request) -> Reply:
            if isinstance(request, LendRequest):
                lent_at.append(clock.now_s)
            return super().ask(node, request)

    monkeypatch.setattr(rehearse, "time", clock)
    lab = Node(card=Card(node=LAB, gpus=GPUS[:1]))
    gpus = (GPUS[0].id,)
    plan = rehearse.Plan(job=HERE, node=lab, gpus=gpus, notice=15 * SECOND, elsewhere=("office",))
    rehearse.run(Watched(lab, seen=(JOB, THERE)), plan, lambda record, share: None, silent)
    assert lent_at == [rehearse.POLL_S]
    assert clock.now_s >= rehearse.COUNT_S


class Interrupted(Clock):
    """Somebody presses Ctrl-C while they wait; and once more, if they are impatient."""

    def __init__(self, *, times: int) -> None:
        super().__init__()
        self._left = times

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self._left:
            self._left -= 1
            raise KeyboardInterrupt


@pytest.mark.parametrize("impatient", [False, True])
def test_who_interrupts_a_rehearsal_is_told_at_once_what_is_still_done(
    monkeypatch: pytest.MonkeyPatch, impatient: bool
) -> None:
    monkeypatch.setattr(rehearse, "time", Interrupted(times=1 + impatient))
    lab = Node(card=Card(node=LAB, gpus=GPUS[:1]))
    gpus = (GPUS[0].id,)
    plan = rehearse.Plan(job=HERE, node=lab, gpus=gpus, notice=15 * SECOND, elsewhere=())
    stage = Stage(lab, 1, seen=(JOB,))
    said: list[tuple[int, str]] = []

    def say(text: str) -> None:
        said.append((len(stage.asked), text))

    with pytest.raises(KeyboardInterrupt):
        rehearse.run(stage, plan, lambda record, share: None, say)
    first, *more = said
    assert first[0] == 1, "before anything else is asked"
    assert "lab lends again what was taken back as soon as it can, in 1m14s" in first[1]
    assert [text for _, text in more] == (
        ["lab may not lend again what was taken back; `rn lend --node lab` sees to it."]
        if impatient
        else []
    )
