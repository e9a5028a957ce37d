"""The small parts of a mind, each alone: what they promise to whoever joins them."""

from dataclasses import replace
from itertools import pairwise

import pytest

from reclaimnet.engine.arrival import told_loss
from reclaimnet.engine.attempt import Attempt
from reclaimnet.engine.booking import BOOKED_PATIENCE, OFFERED_PATIENCE, Booking
from reclaimnet.engine.copies import COPY_TRIES, Copies
from reclaimnet.engine.departure import SAVE_AGAIN, SAVE_TRIES
from reclaimnet.engine.dispatcher import Dispatcher
from reclaimnet.engine.fetch import FETCH_ROUNDS, Fetch
from reclaimnet.engine.lease import Lease
from reclaimnet.engine.neighbourhood import LIVELY, Neighbourhood
from reclaimnet.engine.pen import Pen
from reclaimnet.engine.provider import Provider
from reclaimnet.engine.strays import LOOK_AGAIN, Strays
from reclaimnet.engine.stumbles import SOON, rest_of, stumbles_of
from reclaimnet.model.events import (
    CopyHeld,
    HandoverWithdrawn,
    LendAsked,
    ProbeAnswered,
    ProbeArrived,
    ProcessExited,
    PullFailed,
    RecordSeen,
    SaveFailed,
    SnapshotTaken,
    Written,
)
from reclaimnet.model.market import (
    Card,
    Cause,
    Gpu,
    GpuId,
    JobId,
    NodeId,
    Notice,
    NoticeId,
    Offer,
    Terms,
)
from reclaimnet.model.orders import (
    End,
    Explain,
    HoldLease,
    Order,
    Pull,
    Read,
    Resume,
    Save,
    Tell,
    Write,
)
from reclaimnet.model.probing import Probe, ProbeId, Purpose, Ticket
from reclaimnet.model.units import MINUTE, SECOND
from reclaimnet.model.work import (
    REQUEUE_EXIT_CODE,
    Checkpoint,
    JobRecord,
    JobSpec,
    JobState,
    ManifestId,
    Saving,
    Shape,
    Writer,
)
from reclaimnet.policy.arbitrate import Denied
from reclaimnet.policy.suite import Suite

HERE, THERE, NEXT = NodeId("here"), NodeId("there"), NodeId("next")
JOB = JobId("j")
NEW, OLD = (
    Checkpoint(
        manifest=ManifestId(name), epoch=1, step=step, size=1 << 20, taken_at=step, holders=(THERE,)
    )
    for name, step in (("new", 2), ("old", 1))
)
RECORD = JobRecord(
    id=JOB,
    spec=JobSpec(name="j", user="ada", command=("train",)),
    submitted_at=0,
    revision=1,
    epoch=1,
    state=JobState.RUNNING,
    holder=HERE,
    checkpoints=(NEW, OLD),
)


def neighbourhood(*nodes: NodeId, at: int = 0) -> Neighbourhood:
    around = Neighbourhood(HERE, LIVELY)
    gpu = Gpu(id=GpuId("g"), index=0)
    for node in nodes:
        around.heard(Card(node=node, beat=at, gpus=(gpu,), shelf_bytes=1 << 30), at)
    return around


def pulled(orders: list[Order]) -> list[str]:
    return [order.manifest for order in orders if isinstance(order, Pull)]


# --- the pen -------------------------------------------------------------------------------


def test_a_write_that_was_under_way_when_doubt_came_proves_nothing() -> None:
    pen = Pen()
    assert pen.write(RECORD)
    assert pen.doubt(RECORD) == []
    stored = pen.written(RECORD, replace(RECORD, revision=2))
    assert not pen.trusted
    assert pen.behind
    (again,) = pen.write(stored)
    assert isinstance(again, Write)
    pen.written(stored, replace(stored, revision=3))
    assert pen.trusted
    assert not pen.behind


def test_what_is_wanted_while_a_write_is_under_way_is_not_undone_by_its_answer() -> None:
    pen = Pen()
    pen.write(RECORD)
    wanted = RECORD.but(step=7)
    assert pen.write(wanted) == []
    after = pen.written(wanted, replace(RECORD, revision=2))
    assert (after.step, after.revision, pen.behind) == (7, 2, True)


# --- the lease -----------------------------------------------------------------------------


def test_a_process_whose_epoch_is_in_doubt_is_not_told_to_go_on() -> None:
    lease = Lease(10 * SECOND)
    attempt = Attempt(
        node=HERE, record=RECORD, gpus=(), source=None, suite=Suite(), around=neighbourhood()
    )
    (adopted,) = [order for order in attempt.adopt(0) if isinstance(order, Write)]
    attempt.written(Written(record=adopted.record, writer=Writer.ATTEMPT), 0)
    attempts = {JOB: attempt}
    assert lease.acked(0, 0)
    assert lease.hold(attempts) == [HoldLease(until=10 * SECOND, jobs=(JOB,))]
    assert lease.hold(attempts) == []
    assert not lease.acked(2 * SECOND, 3 * SECOND)
    assert lease.hold(attempts) == [HoldLease(until=12 * SECOND, jobs=(JOB,))]
    assert lease.acked(20 * SECOND, 20 * SECOND)
    (proof,) = [order for order in attempt.doubt() if isinstance(order, Write)]
    assert lease.hold(attempts) == []
    assert not lease.told(JOB)
    attempt.written(Written(record=proof.record, writer=Writer.ATTEMPT), 20 * SECOND)
    assert lease.hold(attempts) == [HoldLease(until=30 * SECOND, jobs=(JOB,))]
    assert lease.told(JOB)


# --- strays --------------------------------------------------------------------------------


def test_a_record_that_names_this_node_by_mistake_is_looked_at_until_it_is_mended() -> None:
    strays = Strays(HERE)
    assert strays.next_wake() is None
    (write,) = strays.record_seen(RecordSeen(job=JOB, record=RECORD), 0)
    assert isinstance(write, Write)
    assert (write.record.state, write.record.holder) == (JobState.PENDING, None)
    assert strays.next_wake() == LOOK_AGAIN
    assert strays.woke(LOOK_AGAIN - 1) == []
    assert strays.woke(LOOK_AGAIN) == [Read(job=JOB)]
    assert strays.next_wake() == 2 * LOOK_AGAIN
    assert strays.record_seen(RecordSeen(job=JOB, record=write.record), LOOK_AGAIN) == []
    assert strays.next_wake() is None


# --- the booking ---------------------------------------------------------------------------


def test_a_place_is_kept_for_as_long_as_somebody_may_send_the_job() -> None:
    around = neighbourhood(THERE)
    booking = Booking(THERE, around, 0)
    assert booking.next_wake() == LIVELY.given_up_after
    around.heard(Card(node=THERE, beat=1), LIVELY.given_up_after)
    assert booking.lapsed(booking.next_wake()) == ""
    silent = booking.next_wake()
    assert silent == 2 * LIVELY.given_up_after
    assert booking.lapsed(silent) == f"{THERE} is silent"


def test_a_state_on_its_way_is_waited_for_longer() -> None:
    around = neighbourhood(THERE, at=OFFERED_PATIENCE)
    booking = Booking(THERE, around, 0)
    assert booking.lapsed(BOOKED_PATIENCE) == "waited too long for the state"
    booking = Booking(THERE, around, 0)
    booking.offer(NEW.manifest, 1)
    assert booking.offered == NEW.manifest
    assert booking.lapsed(BOOKED_PATIENCE) == ""
    assert booking.lapsed(OFFERED_PATIENCE + 1) == "waited too long for the state"


# --- the fetch -----------------------------------------------------------------------------


def failed(checkpoint: Checkpoint, *, damaged: bool = False) -> PullFailed:
    return PullFailed(job=JOB, manifest=checkpoint.manifest, reason="gone", damaged=damaged)


def test_all_checkpoints_are_tried_so_many_times_and_then_no_more() -> None:
    fetch = Fetch(node=HERE, job=JOB, source=None, around=neighbourhood(THERE))
    assert fetch.choose(RECORD, 0) == []
    assert pulled(fetch.ask(RECORD, 0)) == ["new"]
    now = 0
    for round_ in range(1, FETCH_ROUNDS + 1):
        assert pulled(fetch.failed(RECORD, failed(NEW), now)) == ["old"]
        assert pulled(fetch.failed(RECORD, failed(OLD), now)) == []
        assert fetch.exhausted == (round_ == FETCH_ROUNDS)
        if not fetch.exhausted:
            assert fetch.again_at is not None
            now = fetch.again_at
            assert pulled(fetch.ask_again(RECORD, now)) == ["new"]


def test_what_is_damaged_here_is_asked_of_others_before_the_one_before_it() -> None:
    fetch = Fetch(node=HERE, job=JOB, source=None, around=neighbourhood(THERE))
    assert pulled(fetch.damaged(RECORD, failed(NEW, damaged=True), 0)) == ["new"]
    assert pulled(fetch.failed(RECORD, failed(NEW, damaged=True), 0)) == ["old"]


# --- copies --------------------------------------------------------------------------------


def test_who_refused_a_copy_is_not_asked_for_it_again_and_few_are_asked() -> None:
    copies = Copies(
        node=HERE, spec=RECORD.spec, place=Suite().place, around=neighbourhood(THERE, NEXT)
    )
    mine = replace(NEW, holders=(HERE,))
    record = replace(RECORD, checkpoints=(mine,))
    asked = set()
    for _ in range(2):
        keeper, orders = copies.ask(record, mine, 0)
        assert keeper is not None
        assert [order.to for order in orders if isinstance(order, Tell)] == [keeper]
        assert copies.pending == mine.manifest
        copies.settled(mine.manifest)
        assert copies.refused(keeper)
        asked.add(keeper)
    assert asked == {THERE, NEXT}
    assert copies.ask(record, mine, 0)[0] is None
    assert not any(copies.refused(NodeId(f"n{n}")) for n in range(COPY_TRIES - len(asked)))
    copies.begin()
    assert copies.ask(record, mine, 0)[0] in asked


def test_a_copy_is_kept_where_the_job_could_go_within_the_notice() -> None:
    """Whoever kept it before is left for that, unless it has most of it or nobody is nearer."""

    def keeper(record: JobRecord, around: Neighbourhood, promised: int) -> NodeId | None:
        place = Suite().place
        copies = Copies(node=HERE, spec=record.spec, place=place, around=around, promised=promised)
        return copies.ask(record, record.checkpoints[0], 0)[0]

    far, both = neighbourhood(THERE), neighbourhood(THERE, NEXT)
    for around in (far, both):
        around.measured(THERE, rate_bps=10_000_000)
    both.measured(NEXT, rate_bps=100_000_000)
    mine = replace(NEW, size=1_000_000_000, holders=(HERE,))
    for number in range(20):
        # By lot alone, half of them would be kept there.
        record = replace(RECORD, id=JobId(f"j{number}"), checkpoints=(mine,), standby=THERE)
        assert keeper(record, both, 60 * SECOND) == NEXT
        assert keeper(record, both, 300 * SECOND) == THERE
        assert keeper(replace(record, changed=0.1), both, 60 * SECOND) == THERE
        assert keeper(record, far, 60 * SECOND) == THERE


# --- a booking that its source has forgotten ------------------------------------------------


def test_who_is_restarted_while_a_job_leaves_it_gives_back_the_place_it_had_booked() -> None:
    """Else the job that needs a place finds none, since one is kept for it."""
    leaves = replace(RECORD, state=JobState.MIGRATING, standby=THERE)
    withdrawn = Tell(to=THERE, event=HandoverWithdrawn(job=JOB, source=HERE))

    def adopted(record: JobRecord) -> list[Order]:
        around = neighbourhood(THERE)
        attempt = Attempt(
            node=HERE, record=record, gpus=(), source=None, suite=Suite(), around=around
        )
        return attempt.adopt(0)

    lost = Strays(HERE).record_seen(RecordSeen(job=JOB, record=leaves), 0)
    assert withdrawn in adopted(leaves)
    assert withdrawn in lost
    for stays in (replace(leaves, standby=None), replace(leaves, state=JobState.RUNNING)):
        assert not [order for order in adopted(stays) if isinstance(order, Tell)]


# --- a last state that could not be kept ----------------------------------------------------


@pytest.mark.parametrize("why", ["reclaim", "memory"])
def test_a_job_goes_on_after_a_last_state_that_could_not_be_kept(why: str) -> None:
    """It waits for whoever asked for it, and nobody will take it over: should the owner take the
    notice back, it would stand still for ever."""
    around = neighbourhood(THERE)
    record = replace(RECORD, checkpoints=())
    attempt = Attempt(node=HERE, record=record, gpus=(), source=None, suite=Suite(), around=around)
    attempt.adopt(0)
    if why == "reclaim":
        asked = attempt.leave(notice(MINUTE), 0)
        for _ in range(30):
            asked += attempt.woke(attempt.next_wake() or 0)
    else:
        asked = attempt.release("memory", SECOND)
    assert [order for order in asked if isinstance(order, Save) and order.final]
    failed = attempt.save_failed(SaveFailed(job=JOB, epoch=1, reason="the disk is full"), MINUTE)
    assert Resume(job=JOB, epoch=1) in failed


def leaving(
    *,
    grace: int,
    size: int = 1 << 20,
    copying: bool = False,
    saving: Saving = Saving.SDK,
    cause: Cause = Cause.RECLAIM,
) -> Attempt:
    """A job whose last copy is elsewhere, or on its way there, under notice, with nowhere to go."""
    record = replace(RECORD, checkpoints=(replace(NEW, size=size),), save_pause=SECOND)
    record = replace(record, spec=replace(record.spec, saving=saving))
    attempt = Attempt(
        node=HERE, record=record, gpus=(), source=None, suite=Suite(), around=neighbourhood(THERE)
    )
    attempt.adopt(0)
    attempt.copies.pending = NEW.manifest if copying else None
    attempt.leave(notice(grace, cause), 0)
    return attempt


def notice(grace: int, cause: Cause = Cause.RECLAIM) -> Notice:
    return Notice(id=NoticeId("n"), gpus=(), given_at=0, deadline=grace, cause=cause, reason="")


def next_save(attempt: Attempt, until: int) -> int | None:
    """When it is asked for its last state next, if it is before then."""
    while (now := attempt.next_wake()) is not None and now < until:
        if [order for order in attempt.woke(now) if isinstance(order, Save) and order.final]:
            return now
    return None


DISK_FULL = SaveFailed(job=JOB, epoch=1, reason="the disk is full")


def test_a_last_state_is_asked_for_again_a_few_times_with_pauses_between() -> None:
    """By the estimate that the first time was planned with: nothing is begun that would not be done
    by the deadline."""
    grace = 10 * MINUTE
    attempt = leaving(grace=grace, size=15_000_000_000)
    tries, told = [], []
    while (now := next_save(attempt, grace)) is not None:
        tries.append(now)
        assert len(tries) <= SAVE_TRIES
        failed = attempt.save_failed(DISK_FULL, now)
        assert Resume(job=JOB, epoch=1) in failed
        told += [order.decision.chosen for order in failed if isinstance(order, Explain)]
    assert len(tries) == SAVE_TRIES
    pauses = [after - before for before, after in pairwise(tries)]
    assert pauses[0] >= SECOND
    assert pauses == sorted(pauses)
    *retold, last = told
    assert len(retold) == SAVE_TRIES - 1
    assert all(chosen.startswith("not yet, the next try is in ") for chosen in retold)
    assert last == "no"
    assert "could not be saved" in attempt.record.reason


def test_a_last_state_is_not_asked_for_again_when_it_could_not_arrive_any_more() -> None:
    attempt = leaving(grace=MINUTE)
    first = next_save(attempt, MINUTE)
    assert first is not None
    failed = attempt.save_failed(DISK_FULL, MINUTE - SECOND)
    assert [order.decision.chosen for order in failed if isinstance(order, Explain)] == ["no"]
    assert next_save(attempt, MINUTE) is None


def test_a_save_that_nobody_asked_for_may_fail() -> None:
    """One that was under way before, or that a job takes by itself, many times a second."""
    grace = 10 * MINUTE
    attempt = leaving(grace=grace, size=15_000_000_000)
    for now in range(2 * SAVE_TRIES):
        assert attempt.save_failed(DISK_FULL, now) == []
    now = next_save(attempt, grace)
    assert now is not None
    assert Resume(job=JOB, epoch=1) in attempt.save_failed(DISK_FULL, now)
    for later in range(2 * SAVE_TRIES):
        assert attempt.save_failed(DISK_FULL, now + later) == []
    assert next_save(attempt, grace) == now + SAVE_AGAIN


def test_a_shorter_notice_leaves_no_time_for_a_pause() -> None:
    attempt = leaving(grace=10 * MINUTE, size=15_000_000_000)
    now = next_save(attempt, 10 * MINUTE) or 0
    for _ in range(3):
        attempt.save_failed(DISK_FULL, now)
        now = next_save(attempt, 10 * MINUTE) or 0
    attempt.save_failed(DISK_FULL, now)
    attempt.record = replace(attempt.record, checkpoints=())
    assert attempt.notice is not None
    sooner = replace(attempt.notice, deadline=now + 5 * SECOND)
    asked = attempt.leave(sooner, now)
    assert [order for order in asked if isinstance(order, Save) and order.final]


def test_a_state_that_arrives_after_its_job_was_told_to_go_on_is_not_its_last() -> None:
    """A save that was under way before had failed, and was taken for this one."""
    grace = 10 * MINUTE
    attempt = leaving(grace=grace, size=15_000_000_000)
    now = next_save(attempt, grace)
    assert now is not None
    attempt.save_failed(DISK_FULL, now)
    taken = SnapshotTaken(
        job=JOB, epoch=1, manifest=ManifestId("m"), step=3, size=1, final=True, pause=SECOND
    )
    orders = attempt.snapshot_taken(taken, now)
    assert not [order for order in orders if isinstance(order, Tell | End)]
    assert attempt.record.newest is not None
    assert attempt.record.newest.manifest == taken.manifest
    assert next_save(attempt, grace) is not None


# --- an agent that is stopped ---------------------------------------------------------------


def stopped(**fields: object) -> tuple[Attempt, list[Order]]:
    """A job whose agent is stopped, and what is done at once; nobody else can take it."""
    record = replace(RECORD, save_pause=SECOND, **fields)
    attempt = Attempt(
        node=HERE, record=record, gpus=(), source=None, suite=Suite(), around=neighbourhood()
    )
    attempt.adopt(0)
    return attempt, attempt.leave(notice(20 * SECOND, Cause.STOP), 0)


@pytest.mark.parametrize("size", [1 << 20, 1 << 40])
def test_who_stops_an_agent_does_not_wait_for_jobs_to_run_on(size: int) -> None:
    """And a state that could not be sent in time is worth its save: it is found here again."""
    attempt, orders = stopped(checkpoints=(replace(NEW, size=size),))
    assert Save(job=JOB, epoch=1, final=True) in orders
    taken = SnapshotTaken(
        job=JOB, epoch=1, manifest=ManifestId("m"), step=3, size=1, final=True, pause=SECOND
    )
    assert End(job=JOB, epoch=1) in attempt.snapshot_taken(taken, SECOND)


def test_a_stopping_agent_does_not_wait_for_those_that_have_nothing_to_save() -> None:
    cannot = replace(RECORD.spec, saving=Saving.NONE)
    for fields in ({"checkpoints": (), "step": 0}, {"spec": cannot, "step": 9}):
        _, orders = stopped(**fields)
        assert End(job=JOB, epoch=1) in orders
        assert not [order for order in orders if isinstance(order, Save)]


def test_a_stopping_agent_does_not_wait_for_one_that_cannot_be_saved() -> None:
    attempt, _ = stopped(checkpoints=(), step=9)
    now, orders = 0, attempt.save_failed(DISK_FULL, 0)
    while End(job=JOB, epoch=1) not in orders:
        found = next_save(attempt, 20 * SECOND)
        assert found is not None, "it is asked again, or ends"
        now, orders = found, attempt.save_failed(DISK_FULL, found)
    assert now < 20 * SECOND


def later(attempt: Attempt, deadline: int, now: int) -> list[Order]:
    """The owner gives it more time."""
    assert attempt.notice is not None
    return attempt.leave(replace(attempt.notice, deadline=deadline, given_at=now), now)


def test_who_could_not_be_saved_in_time_is_saved_when_the_notice_is_lengthened() -> None:
    first, second = 10 * MINUTE, 20 * MINUTE
    attempt = leaving(grace=first, size=15_000_000_000)
    assert next_save(attempt, first) is not None
    now = first - SECOND
    attempt.save_failed(DISK_FULL, now)
    assert next_save(attempt, first) is None, "there is no time left"
    told = [order.decision for order in later(attempt, second, now) if isinstance(order, Explain)]
    assert "look for a place again" in [decision.chosen for decision in told]
    assert "where to?" in [decision.question for decision in told]
    assert attempt.record.reason == str(Cause.RECLAIM)
    tries = []
    while (at := next_save(attempt, second)) is not None:
        tries.append(at)
        assert len(tries) < SAVE_TRIES
        attempt.save_failed(DISK_FULL, at)
    assert len(tries) == SAVE_TRIES - 1, "one that fails is asked for again as before"


def test_who_only_waits_for_its_last_copy_is_saved_when_the_notice_is_lengthened() -> None:
    attempt = leaving(grace=SECOND, size=15_000_000_000, copying=True)
    assert attempt.next_wake() is None, "there is no time for anything else"
    later(attempt, 2 * SECOND, 0)
    assert attempt.next_wake() is None, "nor is there now"
    grace = 20 * MINUTE
    later(attempt, grace, 0)
    held = attempt.copy_held(CopyHeld(job=JOB, manifest=NEW.manifest, node=THERE), SECOND)
    assert not [order for order in held if isinstance(order, End)]
    assert next_save(attempt, grace) is not None


def test_a_process_that_was_told_to_end_is_not_asked_for_anything_any_more() -> None:
    attempt = leaving(grace=SECOND, size=15_000_000_000)
    orders = later(attempt, 20 * MINUTE, 0)
    assert not [order for order in orders if isinstance(order, Explain | Tell)]
    assert next_save(attempt, 20 * MINUTE) is None


def test_a_job_that_cannot_be_saved_is_not_saved_however_long_its_notice_is() -> None:
    attempt = leaving(grace=MINUTE, saving=Saving.NONE)
    later(attempt, 20 * MINUTE, SECOND)
    assert next_save(attempt, 20 * MINUTE) is None


def test_who_has_given_up_takes_no_place_that_is_found_afterwards() -> None:
    attempt = leaving(grace=MINUTE, copying=True)
    around = attempt.around
    around.heard(replace(around.card(THERE), beat=1, vacant=(GpuId("g"),)), 1)
    (probed,) = [
        order.event
        for order in later(attempt, 2 * MINUTE, 1) + attempt.woke(attempt.next_wake() or 0)
        if isinstance(order, Tell) and isinstance(order.event, ProbeArrived)
    ]
    answer = ProbeAnswered(probe=probed.probe.id, node=THERE)
    assert attempt.departure is not None
    assert attempt.departure.expects(answer)
    later(attempt, 3 * SECOND, 2 * SECOND)
    assert not attempt.departure.expects(answer)


def test_who_leaves_the_uplink_to_others_does_so_while_they_need_it() -> None:
    attempt = leaving(grace=SECOND, size=15_000_000_000, copying=True)
    notice = attempt.notice
    assert notice is not None
    shed = "others have more to lose"
    attempt.leave(replace(notice, deadline=20 * MINUTE), 0, shed=shed)
    assert next_save(attempt, 20 * MINUTE) is None
    attempt.leave(replace(notice, deadline=21 * MINUTE), 0)
    assert next_save(attempt, 21 * MINUTE) is not None


# --- stumbles ------------------------------------------------------------------------------


def ended(record: JobRecord, *, began: int, now: int, code: int = REQUEUE_EXIT_CODE) -> JobRecord:
    """An attempt that is started then and whose process exits now; the record it leaves."""
    waiting = replace(record, holder=None, state=JobState.PENDING)
    attempt = Attempt(
        node=HERE, record=waiting, gpus=(), source=None, suite=Suite(), around=neighbourhood()
    )
    attempt.arrival.begin(began)
    attempt.written(Written(record=attempt.record, writer=Writer.ATTEMPT), began)
    attempt.started(began)
    attempt.exited(ProcessExited(job=JOB, epoch=attempt.epoch, code=code, killed=code == 137), now)
    return attempt.record


def test_a_job_that_ends_at_once_with_nothing_saved_rests_for_longer_each_time() -> None:
    record, rests = replace(RECORD, checkpoints=()), []
    for code in (REQUEUE_EXIT_CODE, 137) * 6:
        record = ended(record, began=5, now=5 + SOON - 1, code=code)
        assert record.state is JobState.PENDING
        rests.append(rest_of(record) // SECOND)
    assert rests == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60, 60]
    assert rest_of(ended(record, began=5, now=5 + SOON)) == 0, "it did something"


def test_a_job_that_saves_the_same_again_and_ends_at_once_rests_as_well() -> None:
    saved = replace(RECORD.checkpoints[0], epoch=1, step=0)
    record = replace(RECORD, epoch=2, checkpoints=(replace(saved, epoch=2), saved), stumbles=1)
    assert stumbles_of(record, began=5, now=6) == 2
    came_on = replace(record, checkpoints=(replace(saved, epoch=2, step=1), saved))
    assert stumbles_of(came_on, began=5, now=6) == 0
    assert stumbles_of(replace(record, checkpoints=record.checkpoints[:1]), began=5, now=6) == 0


def test_a_job_that_rests_is_not_placed_before_and_its_user_is_told_until_when() -> None:
    around = neighbourhood(THERE)
    around.heard(replace(around.card(THERE), beat=1, vacant=(GpuId("g"),)), 1)
    dispatcher = Dispatcher(node=HERE, suite=Suite(), around=around, now=0)
    record = replace(RECORD, holder=None, state=JobState.PENDING, checkpoints=(), stumbles=2)
    (told,) = dispatcher.record_seen(record, 0)
    assert isinstance(told, Explain)
    assert told.decision.chosen == "in 2s"
    assert not [o for o in dispatcher.woke(2 * SECOND - 1) if isinstance(o, Tell)]
    assert [o for o in dispatcher.woke(2 * SECOND) if isinstance(o, Tell)]
    healthy = replace(record, id=JobId("k"), stumbles=0)
    again = Dispatcher(node=HERE, suite=Suite(), around=around, now=0)
    assert [o for o in again.record_seen(healthy, 0) if isinstance(o, Tell)]


# --- what a start costs -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"begun": False, "saved": False, "had": False}, "it has not run yet"),
        ({"begun": True, "saved": False, "had": False}, "it was never saved"),
        ({"begun": True, "saved": True, "had": False}, "none of its checkpoints could be had"),
        ({"begun": True, "saved": True, "had": True}, "3 steps lost"),
    ],
)
def test_what_was_saved_and_cannot_be_had_is_not_called_unsaved(
    fields: dict[str, bool], told: str
) -> None:
    assert told_loss(3, **fields).startswith(told)


# --- the provider -------------------------------------------------------------------------


def test_an_agent_that_ends_takes_nobody_in() -> None:
    provider = Provider(HERE)
    offer = Offer(provider="ada", gpus=(Gpu(id=GpuId("g"), index=0),), terms=Terms(notice=SECOND))
    provider.lend(LendAsked(request="q1", offer=offer), 0)
    probe = Probe(
        id=ProbeId("p"),
        asker=THERE,
        job=JOB,
        shape=Shape(gpus=1),
        purpose=Purpose.START,
        priority=0,
    )
    ticket = provider.arbitrate(probe, Suite().arbitrate, 0)
    assert isinstance(ticket, Ticket)
    provider.closed = True
    assert not provider.redeem(ticket, 0)
    assert provider.vacant() == ()
    assert isinstance(provider.arbitrate(probe, Suite().arbitrate, 0), Denied)
