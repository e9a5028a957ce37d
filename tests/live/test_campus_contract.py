"""The contract on a live campus: which GPUs, to whom, when, and notices that change."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.live.campus import LiveCampus, live_campus
from tests.live.waiting import until

from reclaimnet.model.asking import LendRequest, WithdrawRequest
from reclaimnet.model.market import Terms
from reclaimnet.model.units import MINUTE, SECOND

pytestmark = pytest.mark.needs("nats")

TOPOLOGY = """
[buildings.physics]
uplink = "10G"
[nodes.a]
building = "physics"
uplink = "1G"
[nodes.b]
building = "physics"
uplink = "1G"
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCampus]:
    with live_campus(tmp_path_factory.mktemp("contract")) as campus:
        campus.start("a", gpus=2)
        yield campus


def test_owners_say_which_gpus_to_whom_and_when(shared: LiveCampus) -> None:
    second = next(gpu for gpu in shared["a"].card().gpus if gpu.index == 1)
    hours = "mon-sun 00:00-24:00"
    shared.rn("lend", "--node", "a", "--gpu", second.id, "--user", "ada", "--hours", hours)
    card = shared["a"].card()
    assert [gpu.id for gpu in card.gpus] == [second.id]
    assert card.terms.users == ("ada",)
    assert len(card.terms.hours) == 1
    said = shared.rn("lend", "--node", "a", "--notice", "2m").stdout
    assert "with 2m00s notice. To ada only, mon-sun 00:00-24:00. GPU 0 stays yours" in said
    assert "to ada only, mon-sun 00:00-24:00" in until(
        lambda: text if "notice 2m" in (text := shared.rn("nodes").stdout) else "", "all see it"
    )
    card = shared["a"].card()
    assert [gpu.id for gpu in card.gpus] == [second.id]
    assert card.terms.users == ("ada",)


def test_maintenance_announced_ahead_ends_the_loan_by_itself(shared: LiveCampus) -> None:
    for ahead_s in (3, 6, 12, 24):
        begins = datetime.now(UTC) + timedelta(seconds=ahead_s)
        window = f"{begins.isoformat()}/{(begins + timedelta(hours=1)).isoformat()}"
        shared.rn("lend", "--node", "a", "--notice", "1s", "--maintenance", window)
        lent = shared["a"].card().gpus
        if lent or time.time() < begins.timestamp() - 1.5:
            break  # Else it took so long to say that it has begun.
    assert lent
    until(lambda: not shared["a"].card().gpus, "the loan ends when maintenance begins")
    assert time.time() >= begins.timestamp() - 1.5
    assert shared["a"].card().opens_at is not None
    everything = ("--gpus", "2", "--any-user", "--any-hour", "--no-maintenance")
    shared.rn("lend", "--node", "a", *everything)
    card = shared["a"].card()
    assert len(card.gpus) == 2
    assert card.terms == Terms(notice=SECOND)


def test_a_running_notice_is_moved_both_ways_and_taken_back(shared: LiveCampus) -> None:
    shared.rn("lend", "--node", "a", "--gpus", "2", "--any-user", "--any-hour", "--no-maintenance")
    refused = shared.rn("reclaim", "--node", "a", "--change", "--notice", "5m", check=False)
    assert refused.returncode != 0
    assert "no notice is running" in refused.stderr.lower()
    job = shared.train(steps=100_000)
    shared.await_running(job)

    def deadline() -> int:
        found = shared["a"].card().deadline
        assert found is not None
        return found

    shared.rn("reclaim", "--node", "a", "--notice", "5m")
    given = deadline()
    shared.rn("reclaim", "--node", "a", "--change", "--notice", "20m")
    later = deadline()
    assert later > given + 10 * MINUTE
    shared.rn("reclaim", "--node", "a", "--change", "--notice", "3m")
    assert deadline() < given
    shared.rn("reclaim", "--node", "a", "--cancel")
    assert shared["a"].card().deadline is None
    until(lambda: "every" in shared.rn("why", job).stdout, "the journal says how often it is saved")
    shared.rn("cancel", job)


def test_a_topology_with_a_mistake_is_refused_before_anything_starts(
    shared: LiveCampus, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(TOPOLOGY.replace('building = "physics"\nuplink', 'building = "x"\nuplink'))
    arguments = ("agent", "--name", "z", "--gpus", "1", "--topology", str(plan))
    refused = shared.rn(*arguments, check=False)
    assert refused.returncode != 0
    assert "plan.toml" in refused.stderr
    assert "expected one of ['physics']" in refused.stderr


def test_a_machine_taken_back_stays_so_when_its_agent_is_started_again(tmp_path: Path) -> None:
    """Although the agent is told to lend whenever it starts."""
    with live_campus(tmp_path) as campus:
        campus.start("a", gpus=2)
        agent = campus["a"]
        until(lambda: agent.card().gpus, "the first time, it does")
        assert agent.ask(LendRequest(which=("1",), users=("ada",))).ok
        agent.reclaim(grace_s=0)
        agent.restart()
        # A person is answered only after all that is done at a start.
        assert not agent.ask(WithdrawRequest()).ok
        assert not agent.card().gpus
        assert agent.ask(LendRequest()).ok
        card = agent.card()
        assert [gpu.index for gpu in card.gpus] == [1]
        assert (card.terms.users, card.terms.notice) == (("ada",), 20 * SECOND)
