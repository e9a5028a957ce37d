"""The ladder, rung by rung: what a node orders when its memory runs short."""

from collections.abc import Sequence
from dataclasses import replace

from reclaimnet.engine.airlock import (
    LEAVING_AT_ONCE,
    PROBES,
    RELEASE_FOR,
    SEEK_FOR,
    SUSPEND_AT_MOST,
    SUSPEND_FOR,
    Rung,
)
from reclaimnet.engine.body import Body
from reclaimnet.engine.node import Node
from reclaimnet.engine.phase import Phase
from reclaimnet.model import events as ev
from reclaimnet.model import orders as od
from reclaimnet.model.market import Card, Cause, Gpu, GpuId, JobId, NodeId, Offer, Terms
from reclaimnet.model.pressure import MAX_AGE, Pressure, Usage
from reclaimnet.model.probing import Probe, ProbeId, Purpose, Ticket, TicketId
from reclaimnet.model.units import MILLISECOND, MINUTE, SECOND
from reclaimnet.model.work import JobRecord, JobSpec, JobState, ManifestId, Saving, Shape, Writer
from reclaimnet.policy.suite import Suite

ME, OTHER = NodeId("me"), NodeId("other")
LOW, HIGH = JobId("low"), JobId("high")
LIMIT = 1000


class Story:
    """A node with two running jobs, a clock, and a store that always says yes."""

    def __init__(
        self,
        *,
        saving: Saving = Saving.SDK,
        jobs: Sequence[tuple[JobId, int]] = ((LOW, 0), (HIGH, 9)),
        group: str = "",
    ) -> None:
        self.now = MINUTE
        self.node = Node(Body(node=ME), Suite())
        self.revision = 0
        gpus = tuple(Gpu(id=GpuId(f"g{i}"), index=i) for i in range(max(4, len(jobs))))
        offer = Offer(provider="p", gpus=gpus, terms=Terms(notice=MINUTE))
        self.tell(ev.LendAsked(request="q", offer=offer))
        for index, (job, priority) in enumerate(jobs):
            spec = JobSpec(
                name=job,
                user="u",
                command=("x",),
                priority=priority,
                saving=saving,
                group="" if job == HIGH else group,
            )
            record = JobRecord(
                id=job,
                spec=spec,
                submitted_at=0,
                revision=1,
                state=JobState.RUNNING,
                epoch=1,
                holder=ME,
                started_at=self.now,
            )
            found = ev.ProcessFound(record=record, gpus=(gpus[index].id,))
            self.tell(found)
        self.tell(ev.BeatAcked(sent_at=self.now))

    def tell(self, event: ev.Event) -> list[od.Order]:
        orders = self.node.handle(event, self.now)
        for order in list(orders):
            if isinstance(order, od.Write):
                self.revision += 1
                stored = replace(order.record, revision=self.revision)
                orders += self.tell(ev.Written(record=stored, writer=Writer.ATTEMPT))
        return orders

    def read(self, low: int, high: int, *, after: int = 100 * MILLISECOND, **fields):
        return self.read_all({LOW: low, HIGH: high}, after=after, **fields)

    def read_all(self, held: dict[JobId, int], *, after: int = 100 * MILLISECOND, **fields):
        self.now += after
        return self.tell(ev.PressureRead(reading=self.reading(held, **fields)))

    def reading(self, held: dict[JobId, int], **fields) -> Pressure:
        jobs = tuple(
            Usage(job=job, epoch=1, bytes=size)
            for job, size in held.items()
            if job in self.node.guests.attempts
        )
        at = fields.pop("at", self.now)
        return Pressure(at=at, limit=LIMIT, used=sum(held.values()), jobs=jobs, **fields)

    def suspend_low(self, **fields) -> list[od.Order]:
        self.read(380, 583, **fields)
        orders = self.read(403, 583, **fields)
        assert self.node.airlock.holds[LOW].rung == Rung.SUSPENDED
        return orders

    def meet(self, vacant: int) -> None:
        gpus = tuple(Gpu(id=GpuId(f"o{i}"), index=i) for i in range(vacant))
        card = Card(
            node=OTHER,
            beat=self.now,
            gpus=gpus,
            vacant=tuple(g.id for g in gpus),
            shelf_bytes=1 << 40,
        )
        self.tell(ev.BeatHeard(card=card))

    def wait(self, time: int) -> list[od.Order]:
        """Let time pass, waking the mind when it asks for it."""
        end, orders = self.now + time, []
        while (wake := self.node.next_wake()) is not None and wake <= end:
            self.now = max(wake, self.now)
            orders += self.tell(ev.Woke())
        self.now = end
        return orders


def kinds(orders, *of) -> list[od.Order]:
    return [order for order in orders if isinstance(order, of)]


def chosen(orders) -> list[str]:
    return [f"{o.decision.question} {o.decision.chosen}" for o in kinds(orders, od.Explain)]


def test_the_stop_comes_before_everything_else_and_the_record_says_so() -> None:
    story = Story()
    orders = story.suspend_low()
    assert orders[0] == od.Suspend(job=LOW, epoch=1)
    record = story.node.guests.attempts[LOW].record
    assert record.state == JobState.SUSPENDED
    assert "memory in use" in record.reason
    assert any("who stands still?" in line for line in chosen(orders))


def test_nothing_is_decided_on_an_old_reading() -> None:
    """Elsewhere it woke at once, but decided on statistics of ten seconds ago."""
    story = Story()
    story.read(380, 583)
    stale = story.read(403, 583, at=story.now - MAX_AGE)
    assert kinds(stale, od.Suspend) == []


def test_it_goes_on_when_there_is_room_again() -> None:
    story = Story()
    story.suspend_low()
    assert kinds(story.read(403, 583, after=SECOND), od.Unsuspend) == []
    orders = story.read(403, 300, after=SECOND)
    assert kinds(orders, od.Unsuspend) == [od.Unsuspend(job=LOW, epoch=1)]
    assert story.node.guests.attempts[LOW].record.state == JobState.RUNNING
    assert not story.node.airlock.holds


def test_a_renewed_lease_does_not_undo_it() -> None:
    story = Story()
    story.suspend_low()
    story.now += SECOND
    orders = story.tell(ev.BeatAcked(sent_at=story.now))
    assert kinds(orders, od.HoldLease)
    assert kinds(orders, od.Unsuspend) == []
    assert LOW in story.node.airlock.holds


def test_it_is_not_saved_by_the_clock_while_it_stands_still() -> None:
    story = Story()
    story.suspend_low()
    story.read(403, 583)
    saves = [o for o in story.wait(SUSPEND_FOR - 2 * SECOND) if isinstance(o, od.Save)]
    assert LOW not in {save.job for save in saves}


def test_released_means_saved_ended_and_back_in_the_queue() -> None:
    story = Story()
    story.suspend_low()
    orders = story.wait(SUSPEND_FOR)
    mine = [o for o in orders if getattr(o, "job", None) == LOW]
    steps = [type(o) for o in kinds(mine, od.Unsuspend, od.Save, od.Limit)]
    assert steps == [od.Limit, od.Unsuspend, od.Save]
    (limit,) = kinds(mine, od.Limit)
    assert limit.at is not None
    assert limit.at <= story.now + RELEASE_FOR
    taken = ev.SnapshotTaken(
        job=LOW, epoch=1, manifest=ManifestId("m"), step=5, size=9, final=True, pause=0
    )
    assert kinds(story.tell(taken), od.End) == [od.End(job=LOW, epoch=1)]
    orders = story.tell(ev.ProcessExited(job=LOW, epoch=1, code=137, killed=True))
    (last,) = [o.record for o in kinds(orders, od.Write) if o.record.holder is None][:1]
    assert last.state == JobState.PENDING
    assert last.reason.startswith("Released:")
    assert last.newest is not None
    assert last.newest.step == 5
    assert LOW not in story.node.airlock.holds


def test_who_is_above_waits_for_those_below_to_leave_and_not_for_ever() -> None:
    """All were stopped at the same moment, so that the time of all is up at the same moment."""
    story = Story()
    story.read(300, 520)
    story.read(420, 570)
    assert set(story.node.airlock.holds) == {LOW, HIGH}
    orders = story.wait(SUSPEND_FOR + 2 * SECOND)
    assert story.node.airlock.holds[LOW].rung == Rung.RELEASED
    assert {save.job for save in kinds(orders, od.Save)} <= {LOW}
    assert story.node.airlock.holds[HIGH].rung == Rung.SUSPENDED
    story.wait(SUSPEND_AT_MOST - SUSPEND_FOR)
    assert story.node.airlock.holds[HIGH].rung == Rung.RELEASED


def test_not_all_leave_when_the_time_of_all_is_up() -> None:
    jobs = [JobId(f"j{index}") for index in range(8)]
    story = Story(jobs=[(job, 0) for job in jobs])
    story.read_all(dict.fromkeys(jobs, 100))
    story.read_all(dict.fromkeys(jobs, 124))
    assert set(story.node.airlock.holds) == set(jobs)
    story.wait(SUSPEND_FOR + SECOND)
    rungs = [story.node.airlock.holds[job].rung for job in jobs]
    assert rungs.count(Rung.RELEASED) == 1
    story.wait(SUSPEND_AT_MOST - SUSPEND_FOR)
    assert Rung.SUSPENDED not in {hold.rung for hold in story.node.airlock.holds.values()}


def test_a_group_leaves_together_however_large() -> None:
    jobs = [JobId(f"j{index}") for index in range(LEAVING_AT_ONCE + 2)]
    story = Story(jobs=[*((job, 0) for job in jobs), (HIGH, 9)], group="gang")
    story.read_all({**dict.fromkeys(jobs, 60), HIGH: 520})
    story.read_all({**dict.fromkeys(jobs, 68), HIGH: 577})
    story.wait(SUSPEND_FOR + SECOND)
    assert {story.node.airlock.holds[job].rung for job in jobs} == {Rung.RELEASED}


def test_one_that_has_only_just_begun_does_not_run_on_while_others_above_it_are_stopped() -> None:
    """It is not in the reading yet."""
    story = Story(jobs=((LOW, 0), (JobId("mid"), 5), (HIGH, 9)))
    story.read_all({JobId("mid"): 380, HIGH: 583})
    orders = story.read_all({JobId("mid"): 403, HIGH: 583})
    assert [stop.job for stop in kinds(orders, od.Suspend)] == [LOW, "mid"]


def test_who_will_be_stopped_is_known_before_anybody_is_told() -> None:
    story = Story()
    story.read(380, 583)
    story.now += 100 * MILLISECOND
    reading = story.reading({LOW: 403, HIGH: 583})
    assert story.node.airlock.reflex(reading) == [(LOW, 1)]
    assert not story.node.airlock.holds
    orders = story.tell(ev.PressureRead(reading=reading))
    assert kinds(orders, od.Suspend) == [od.Suspend(job=LOW, epoch=1)]
    assert story.node.airlock.stands_still(LOW, 1)
    assert not story.node.airlock.stands_still(LOW, 2)
    assert story.node.airlock.reflex(reading) == []


def test_who_was_stopped_ahead_is_not_stopped_twice_and_nobody_else_in_its_place() -> None:
    """Memory is as full as before for a moment: what stands still frees nothing yet."""
    story = Story()
    story.read(380, 583)
    story.now += 100 * MILLISECOND
    reading = story.reading({LOW: 403, HIGH: 583})
    stopped = story.node.airlock.reflex(reading)
    story.now += 20 * MILLISECOND
    again = story.reading({LOW: 404, HIGH: 583})
    assert story.node.airlock.reflex(again, stopped) == []


def test_a_save_that_fails_stops_it_again_and_is_not_tried_for_ever() -> None:
    story = Story()
    story.suspend_low()
    story.wait(SUSPEND_FOR)
    failed = ev.SaveFailed(job=LOW, epoch=1, reason="the disk is full")
    orders = story.tell(failed)
    assert kinds(orders, od.Suspend) == [od.Suspend(job=LOW, epoch=1)]
    assert kinds(orders, od.End) == []
    assert story.node.airlock.holds[LOW].rung == Rung.SUSPENDED
    story.wait(SUSPEND_FOR)
    orders = story.tell(failed)
    assert kinds(orders, od.End) == [od.End(job=LOW, epoch=1)]


def test_with_another_place_it_leaves_by_the_path_of_a_reclaim() -> None:
    story = Story()
    story.suspend_low()
    story.wait(SUSPEND_FOR - SECOND)
    story.meet(vacant=1)
    orders = story.wait(SECOND)
    attempt = story.node.guests.attempts[LOW]
    assert attempt.notice is not None
    assert attempt.notice.cause == Cause.PRESSURE
    (asked,) = [o for o in kinds(orders, od.Tell) if isinstance(o.event, ev.ProbeArrived)]
    assert kinds(orders, od.Unsuspend) == []
    assert len(story.node.provider.offer.gpus) == 4
    ticket = Ticket(
        id=TicketId("t"), node=OTHER, job=LOW, gpus=(GpuId("o0"),), expires=story.now + SECOND
    )
    answer = ev.ProbeAnswered(probe=asked.event.probe.id, node=OTHER, ticket=ticket)
    orders = story.tell(answer)
    steps = [type(o) for o in kinds(orders, od.Unsuspend, od.Save)]
    assert steps == [od.Unsuspend, od.Save]


def test_it_asks_no_more_than_so_many_nodes_and_not_for_long() -> None:
    story = Story()
    story.suspend_low()
    story.wait(SUSPEND_FOR - SECOND)
    story.meet(vacant=1)
    probes = 0
    orders = story.wait(SECOND)
    for _ in range(20):
        asked = [o for o in kinds(orders, od.Tell) if isinstance(o.event, ev.ProbeArrived)]
        probes += len(asked)
        orders = []
        for probe in asked:
            no = ev.ProbeAnswered(probe=probe.event.probe.id, node=OTHER, reasons=("full",))
            orders += story.tell(no)
        orders += story.wait(SECOND)
        if story.node.airlock.holds[LOW].rung == Rung.RELEASED:
            break
    assert 0 < probes <= PROBES
    assert story.node.airlock.holds[LOW].rung == Rung.RELEASED
    assert SEEK_FOR <= 2 * SECOND


def test_stopped_twice_in_a_row_it_moves_without_waiting() -> None:
    story = Story()
    story.suspend_low()
    story.read(403, 300, after=SECOND)
    assert not story.node.airlock.holds
    story.meet(vacant=1)
    story.read(380, 583)
    orders = story.read(403, 583)
    assert "wait here for room? no, it moves" in chosen(orders)
    assert story.node.airlock.holds[LOW].rung == Rung.READDRESSED


def test_the_owner_comes_first_even_for_a_job_that_stands_still() -> None:
    story = Story()
    story.suspend_low()
    orders = story.tell(ev.ReclaimAsked(request="r", gpus=(GpuId("g0"),), grace=5 * SECOND))
    limits = [o for o in kinds(orders, od.Limit) if o.job == LOW]
    assert limits == [od.Limit(job=LOW, epoch=1, at=story.now + 5 * SECOND)]
    orders = story.wait(5 * SECOND)
    steps = [type(o) for o in kinds(orders, od.Unsuspend, od.Save) if o.job == LOW]
    assert steps == [od.Unsuspend, od.Save]


def test_a_withdrawn_notice_does_not_call_a_move_for_memory_off() -> None:
    story = Story()
    story.suspend_low()
    story.wait(SUSPEND_FOR - SECOND)
    story.meet(vacant=1)
    story.wait(SECOND)
    story.tell(ev.ReclaimAsked(request="r", gpus=(GpuId("g1"),), grace=MINUTE))
    story.tell(ev.WithdrawAsked(request="w"))
    assert story.node.guests.attempts[LOW].departure is not None
    assert story.node.guests.attempts[HIGH].departure is None


def test_a_found_job_that_stood_still_goes_on_standing_still() -> None:
    story = Story()
    node = Node(Body(node=ME), Suite())
    record = story.node.guests.attempts[LOW].record
    since = story.now - 3 * SECOND
    found = ev.ProcessFound(record=record, gpus=(GpuId("g0"),), suspended_at=since)
    orders = node.handle(found, story.now)
    assert kinds(orders, od.Unsuspend) == []
    assert node.airlock.holds[LOW].since == since
    assert node.guests.attempts[LOW].record.state == JobState.SUSPENDED
    assert node.airlock.next_wake() is not None


def test_swap_is_used_first_where_there_is_some() -> None:
    story = Story()
    orders = story.suspend_low(swap_free=10_000)
    assert orders[0] == od.Suspend(job=LOW, epoch=1, push_out=True)
    assert kinds(story.read(403, 592, swap_free=10_000), od.Save) == []
    assert kinds(story.read(403, 592, after=SUSPEND_FOR // 2, swap_free=10_000), od.Save)


def test_a_killed_by_the_kernel_job_is_not_its_own_fault() -> None:
    story = Story()
    reason = "the kernel ended it: memory ran out"
    event = ev.ProcessExited(job=LOW, epoch=1, code=137, killed=True, reason=reason)
    (record,) = [o.record for o in kinds(story.tell(event), od.Write)][:1]
    assert (record.state, record.holder) == (JobState.PENDING, None)
    assert reason in record.reason


def test_newcomers_are_refused_with_a_reason_and_room_is_kept_for_those_who_come() -> None:
    story = Story()
    story.read(400, 300)

    def ask(job: str, priority: int = 0, need: int = 0) -> ev.ProbeAnswered:
        probe = Probe(
            id=ProbeId(f"p-{job}"),
            asker=OTHER,
            job=JobId(job),
            shape=Shape(gpus=1, user="u", memory_bytes=need),
            purpose=Purpose.START,
            priority=priority,
        )
        (answer,) = kinds(story.tell(ev.ProbeArrived(probe=probe)), od.Tell)
        return answer.event

    assert ask("a", need=200).ticket is not None
    refused = ask("b", need=200)
    assert refused.ticket is None
    assert "asked for 200 B of memory, and 70 B are free" in refused.reasons[0]
    story.now += 3 * SECOND
    story.suspend_low()
    assert "wait for memory" in ask("c").reasons[0]
    assert ask("d", priority=5).ticket is not None


def test_what_top_shows_of_it() -> None:
    story = Story()
    story.suspend_low()
    (held,) = story.node.airlock.suspensions()
    assert (held.job, held.rung, held.bytes) == (LOW, "suspended", 403)
    assert held.until == held.since + SUSPEND_FOR
    assert story.node.guests.attempts[HIGH].phase == Phase.RUNNING
