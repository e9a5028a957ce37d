"""Tables: what people see at 80 columns, and whole when piped."""

from dataclasses import replace

from reclaimnet.apps import cli_tables
from reclaimnet.apps.calendar import show_moment
from reclaimnet.apps.client import Node
from reclaimnet.model.hours import parse_hours
from reclaimnet.model.market import Card, Gpu, GpuId, JobId, Maintenance, NodeId, Progress, Terms
from reclaimnet.model.units import DAY, GIB, HOUR, MINUTE, SECOND
from reclaimnet.model.work import JobRecord, JobSpec, JobState

NOW = 100 * HOUR


def a_job(id: str, name: str, **fields: object) -> JobRecord:
    spec = JobSpec(name=name, user="ada", command=("x",), gpus=2)
    return JobRecord(id=JobId(id), spec=spec, submitted_at=NOW - 90 * MINUTE, **fields)


JOBS = [
    a_job("8f3a2c", "resnet", state=JobState.RUNNING, holder=NodeId("lab-3"), step=1200, moves=2),
    a_job("91c04e", "a-job-with-quite-a-long-name", reason="no node has 2 vacant GPUs; ask later"),
    a_job(
        "b21f77",
        "bert",
        state=JobState.FAILED,
        holder=NodeId("workstation-of-prof-lovelace"),
        exit_code=3,
        steps_lost=12345,
        step=9876543,
        ended_at=NOW - 85 * MINUTE,
    ),
]


def test_jobs_at_80_columns() -> None:
    assert cli_tables.job_table(JOBS, now=NOW, width=80) == [
        "JOB    NAME             ST NODE        GPU    STEP MV  LOST   AGE REASON",
        "8f3a2c resnet           R  lab-3         2    1200  2     0 1h30m -",
        "91c04e a-job-with-quit… PD -             2       0  0     0 1h30m no node has 2…",
        "b21f77 bert             F  workstatio…   2 9876543  0 12345 5m00s exit 3",
    ]


def test_a_gang_shows_how_many_nodes_it_has() -> None:
    spec = JobSpec(name="big", user="ada", command=("x",), gpus=2, nodes=3)
    seats = (NodeId("a"), NodeId("b"), NodeId("c"))
    job = replace(JOBS[0], spec=spec, holder=seats[0], seats=seats)
    line = cli_tables.job_table([job], now=NOW, width=None)[1]
    assert "a +2" in line
    assert " 3x2 " in line


def test_jobs_when_piped_are_whole() -> None:
    lines = cli_tables.job_table(JOBS, now=NOW, width=None)
    assert "a-job-with-quite-a-long-name" in lines[2]
    assert lines[2].endswith("no node has 2 vacant GPUs; ask later")
    assert "workstation-of-prof-lovelace" in lines[3]


def test_no_line_is_wider_than_the_terminal() -> None:
    for width in range(72, 200):
        lines = cli_tables.job_table(JOBS, now=NOW, width=width)
        assert max(map(len, lines)) <= width


def test_long_ids_are_shortened_as_far_as_they_stay_unique() -> None:
    ids = ["0123456789abcdef", "0123456789abceee", "fedcba9876543210"]
    assert cli_tables.short_ids(ids) == {
        "0123456789abcdef": "0123456789abcd",
        "0123456789abceee": "0123456789abce",
        "fedcba9876543210": "fedcba987654",
    }


def test_a_name_cannot_steer_the_terminal() -> None:
    job = a_job("a", "evil\x1b[2J\nFAKE")
    lines = cli_tables.job_table([job], now=NOW, width=None)
    assert len(lines) == 2
    assert "\x1b" not in lines[1]


def test_nodes_have_a_line_for_each_gpu_with_what_it_does() -> None:
    gpus = tuple(
        Gpu(id=GpuId(f"GPU-{index}"), index=index, model=model, memory_bytes=memory * GIB)
        for index, (model, memory) in enumerate([("A100", 80), ("RTX 4090", 24), ("A100", 0)])
    )
    card = Card(
        node=NodeId("lab-3"),
        provider="ada",
        gpus=gpus,
        vacant=(gpus[1].id,),
        leaving=(gpus[2].id,),
        deadline=NOW + 12 * SECOND,
        terms=Terms(notice=20 * SECOND),
        jobs=(Progress(job=JobId("8f3a2c"), epoch=1, step=7, at=0),),
    )
    nothing = replace(card, node=NodeId("lab-4"), gpus=(), vacant=(), leaving=(), jobs=())
    nodes = [Node(card=nothing, age_s=9, state="DOWN"), Node(card=card, age_s=1, state="MIXED")]
    assert cli_tables.node_lines(nodes, now=NOW, width=80) == [
        "lab-3  MIXED  lent by ada  notice 20s  seen 1s ago  jobs: 8f3a2c",
        "  [0] A100       80.0 GiB  busy",
        "  [1] RTX 4090   24.0 GiB  vacant",
        "  [2] A100              -  leaving in 12s",
        "lab-4  DOWN  of ada  seen 9s ago",
        "  lends nothing now",
    ]


def test_a_job_whose_node_is_silent_is_not_said_to_run_there_without_a_word() -> None:
    job = replace(JOBS[0], state=JobState.RUNNING, holder=NodeId("lab"), reason="")
    gone = cli_tables.silent_nodes([job], [])
    [_, line] = cli_tables.job_table([job], now=NOW, width=None, silent=gone)
    assert "lab is not heard of" in line
    [_, line] = cli_tables.job_table([job], now=NOW, width=None)
    assert "not heard" not in line


def test_terms_that_are_not_the_usual_are_shown_with_when_it_lends_again() -> None:
    window = Maintenance(begins=NOW - HOUR, ends=NOW + HOUR)
    terms = Terms(
        notice=5 * SECOND,
        users=("ada", "bob"),
        hours=parse_hours("mon-fri 18:00-08:00"),
        utc_offset=-7 * HOUR // 2,
        maintenance=(window, Maintenance(begins=NOW - DAY, ends=NOW - HOUR)),
    )
    card = Card(node=NodeId("lab-5"), provider="ada", terms=terms, opens_at=NOW + 2 * HOUR)
    lines = cli_tables.node_lines([Node(card=card, age_s=1, state="RECLAIMED")], now=NOW, width=60)
    assert lines[0] == "lab-5  RECLAIMED  lent by ada  notice 5s  seen 1s ago"
    said = " ".join(line.strip() for line in lines[1:-1])
    assert said == (
        "to ada, bob only, mon-fri 18:00-08:00 (UTC-3.5), "
        f"not from {show_moment(window.begins)} to {show_moment(window.ends)}"
    )
    assert max(map(len, lines)) <= 60
    assert lines[-1].startswith("  lends nothing now, and again by itself in 2h")


def test_of_a_node_that_is_not_heard_nothing_is_known() -> None:
    gpu = Gpu(id=GpuId("GPU-0"), index=0)
    card = Card(node=NodeId("lab-6"), gpus=(gpu,), vacant=(gpu.id,))
    lines = cli_tables.node_lines(
        [Node(card=card, age_s=99, state="UNREACHABLE")], now=NOW, width=80
    )
    assert lines[-1].endswith("not known")
