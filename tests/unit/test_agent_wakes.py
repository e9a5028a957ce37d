"""An agent that starts takes up what the one before it has left, as if it had never been gone."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from OpenSSL import SSL

from reclaimnet.adapters.linux.attempts import reports as rn
from reclaimnet.adapters.vault.store import Vault
from reclaimnet.apps.agent import take_up
from reclaimnet.apps.bench.one_node import OneNode
from reclaimnet.apps.live import world as live
from reclaimnet.apps.live.clock import Clock
from reclaimnet.apps.owners_word import OwnersWord
from reclaimnet.engine.body import Body
from reclaimnet.engine.node import Node
from reclaimnet.engine.provider import Provider
from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.market import Gpu, GpuId, JobId, NodeId, Offer, Terms
from reclaimnet.model.units import GIB, MINUTE
from reclaimnet.model.work import JobRecord, JobSpec, JobState, Saving
from reclaimnet.policy.suite import Suite

ME = NodeId("me")
GPU = Gpu(id=GpuId("g"), index=0)
RECORD = JobRecord(
    id=JobId("j"),
    spec=JobSpec(name="j", user="u", command=("x",)),
    submitted_at=0,
    revision=1,
    state=JobState.RUNNING,
    epoch=1,
    holder=ME,
)
FOUND = rn.Found(
    job=RECORD.id,
    epoch=1,
    gpus=(GPU.id,),
    saving=Saving.SDK,
    step=7,
    warm=False,
    waiting=False,
    suspended_at=None,
    exit=None,
)


class World:
    """One job outlived the agent before. The mind is woken while that is found out: how much memory
    there is, for one, is told from the first moment on."""

    def __init__(self, clock: Clock) -> None:
        self.mind = Node(Body(node=ME), Suite())
        self.orders: list[od.Order] = []
        self.records = self
        self._clock = clock
        self.after_owner_event: Callable[[], None] = lambda: None

    def deliver(self, event: ev.Event) -> None:
        self.orders += self.mind.handle(event, self._clock.now())
        if isinstance(event, (ev.LendAsked, ev.ReclaimAsked, ev.Woke)):
            self.after_owner_event()

    async def find(self, wanted: Callable[[JobRecord], bool]) -> list[JobRecord]:
        self.deliver(ev.Woke())
        return [record for record in (RECORD,) if wanted(record)]

    async def adopt(
        self, records: Iterable[JobRecord], tell: Callable[[Sequence[rn.Found]], None]
    ) -> None:
        assert list(records) == [RECORD]
        self.deliver(ev.Woke())
        tell([FOUND])

    def manifests(self, job: JobId) -> tuple[()]:
        return ()


def test_a_notice_that_runs_finds_the_guests_it_is_for(tmp_path: Path) -> None:
    """However long it takes to look for them: GPUs that nobody uses are their owner's at once, and
    the job would run on without a warning until it is killed."""
    clock = Clock()
    book = Provider(ME)
    book.lend(ev.LendAsked(request="q", offer=Offer(provider="p", gpus=(GPU,), terms=Terms())), 0)
    book.reclaim(ev.ReclaimAsked(request="r", grace=10 * MINUTE), clock.now())
    file = tmp_path / "provider.json"
    OwnersWord(node=ME, gpus=(GPU,), file=file, clock=clock).keep(book)
    word = OwnersWord(node=ME, gpus=(GPU,), file=file, clock=clock)
    world = World(clock)
    asyncio.run(
        take_up(
            ME,
            world=world,  # type: ignore[arg-type]
            word=word,
            clock=clock,
            campus=world,  # type: ignore[arg-type]
            vault=world,  # type: ignore[arg-type]
        )
    )
    (kept,) = world.mind.provider.notices.values()
    (given,) = book.notices.values()
    assert kept.deadline == pytest.approx(given.deadline, abs=MINUTE)
    assert [order.notice for order in world.orders if isinstance(order, od.Warn)] == [kept]
    again = OwnersWord(node=ME, gpus=(GPU,), file=file, clock=clock)
    assert [type(event) for event in again.kept()] == [ev.LendAsked, ev.ReclaimAsked]


class EndsEarly:
    """A runner whose only attempt ends as soon as it is found."""

    def __init__(self, root: Path, on: rn.Tell, **options: object) -> None:
        self._on = on

    def adopt(self) -> list[rn.Found]:
        self._on(rn.Exited(job=RECORD.id, epoch=1, code=3, killed=False, reason=""))
        return [FOUND]

    def memory(self) -> dict[tuple[JobId, int], tuple[Path | None, int]]:
        return {}

    def __getattr__(self, order: str) -> Callable[..., None]:
        return lambda *_, **__: None


async def test_a_job_that_ends_while_it_is_found_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would run it again, nor say what became of it: its end is told once."""
    monkeypatch.setattr(live, "Runner", EndsEarly)
    clock, campus = Clock(), OneNode()
    campus.store.records[RECORD.id] = RECORD
    mind = Node(Body(node=ME), Suite())
    with Vault(tmp_path / "vault", quota_bytes=GIB) as vault:
        world = campus.world = live.LiveWorld(
            node=ME,
            folder=tmp_path,
            mind=mind,
            campus=campus,  # type: ignore[arg-type]
            vault=vault,
            client=SSL.Context(SSL.TLS_METHOD),
            clock=clock,
        )
        try:
            word = OwnersWord(node=ME, gpus=(GPU,), file=tmp_path / "provider.json", clock=clock)
            await take_up(
                ME,
                world=world,
                word=word,
                clock=clock,
                campus=campus,  # type: ignore[arg-type]
                vault=vault,
            )
            async with asyncio.timeout(60):
                await world.empty()
        finally:
            await world.close()
    ended = campus.store.records[RECORD.id]
    assert (ended.state, ended.exit_code) == (JobState.FAILED, 3)
