"""What a witness believes: by seals and signatures, by what was before, by who was heard."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reclaimnet.adapters.nats.access import Key, new_key
from reclaimnet.adapters.nats.seals import Seal, job_words
from reclaimnet.adapters.nats.streams import KEPT_CARD
from reclaimnet.adapters.nats.witness import Doubt, Version, Witness
from reclaimnet.adapters.tls import ca
from reclaimnet.model.market import Card, JobId, NodeId, Progress
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord, JobSpec, JobState
from reclaimnet.wire import GATEWAY, encode_record

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
JOB = JobId("j-1")
SPEC = JobSpec(name="x", user="ada", command=("true",))
LEASE = 4 * SECOND
BEAT = SECOND


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> ca.Authority:
    folder: Path = tmp_path_factory.mktemp("ca")
    return ca.make_ca(folder)


class Stage:
    """A store, a clock, and a witness for each of the gateway and three nodes."""

    def __init__(self, authority: ca.Authority, **options) -> None:
        self.now = 1000 * SECOND
        self.keys = {name: new_key(name) for name in (GATEWAY, A, B, C)}
        self.runs: dict[NodeId, int] = {}
        self.witnesses = {
            name: Witness(
                name,
                key=key,
                seal=Seal(authority.pem.decode(), authority.key if name == GATEWAY else None),
                lease=LEASE,
                clock=lambda: self.now,
                wall=lambda: self.now,
                **options,
            )
            for name, key in self.keys.items()
        }
        self.stored: tuple[JobRecord, bytes, str, int] | None = None
        self.beat(A, B, C)

    def beat(self, *nodes: NodeId) -> None:
        for node in nodes:
            epoch = self.runs.get(node)
            jobs = () if epoch is None else (Progress(job=JOB, epoch=epoch, step=1, at=1),)
            card = self.witnesses[node].introduce(Card(node=node, beat=self.now, jobs=jobs))
            for witness in self.witnesses.values():
                witness.hear(card, self.now)

    def pause(self, time: int, *speaking: NodeId) -> None:
        """Time passes; only these are heard in it."""
        end = self.now + time
        while self.now < end:
            self.now += BEAT
            self.beat(*speaking)

    def write(self, by: NodeId, record: JobRecord) -> JobRecord:
        """By who may; who does not know what is stored looks first."""
        witness = self.witnesses[by]
        if not witness.knows_before(record):
            assert self.doubt(by) is None
        record = record.but(revision=record.revision + 1)
        record = witness.complete(record)
        value = encode_record(record.but(revision=0))
        version, mark = witness.signed(record, value)
        self.stored = (record, value, mark, self.now)
        witness.note(version)
        return record

    def read(self, by: NodeId) -> Version:
        assert self.stored is not None
        record, value, mark, at = self.stored
        return self.witnesses[by].opened(record, value, mark, stored_at=at)

    def doubt(self, by: NodeId, *, follows: bool = True) -> Doubt | None:
        version = self.read(by)
        doubt = self.witnesses[by].doubt(version, follows=follows)
        if doubt is None and follows:
            self.witnesses[by].note(version)
        return doubt

    def running_on_a(self) -> JobRecord:
        submitted = self.write(GATEWAY, JobRecord(id=JOB, spec=SPEC, submitted_at=1))
        for node in (A, B, C):
            assert self.doubt(node) is None
        held = submitted.but(holder=A, epoch=1, state=JobState.RUNNING)
        running = self.write(A, held)
        self.runs[A] = 1
        self.beat(A)
        for name in (GATEWAY, B, C):
            assert self.doubt(name) is None
        return running


@pytest.fixture
def stage(authority: ca.Authority) -> Stage:
    return Stage(authority)


def lost(record: JobRecord) -> JobRecord:
    return record.but(holder=None, state=JobState.PENDING, reason="NodeFail")


def test_the_word_of_a_dispatcher_counts_if_the_holder_was_silent(stage: Stage) -> None:
    running = stage.running_on_a()
    stage.pause(LEASE, B, C)
    stage.write(B, lost(running))
    assert stage.doubt(GATEWAY) is None
    assert stage.doubt(A) is None


def test_it_counts_also_when_the_holder_has_come_back_since(stage: Stage) -> None:
    running = stage.running_on_a()
    stage.pause(LEASE + BEAT, B, C)
    stage.beat(A)
    stage.write(B, lost(running))
    assert stage.doubt(GATEWAY) is None
    assert stage.doubt(A) is None


def test_it_does_not_count_if_the_holder_was_heard_all_the_time(stage: Stage) -> None:
    running = stage.running_on_a()
    stage.pause(3 * LEASE, A, B, C)
    stage.write(B, lost(running))
    for name in (GATEWAY, A):
        doubt = stage.doubt(name)
        assert doubt is not None
        assert doubt.victim == A
        # The holder itself knows; others wait for its next word.
        assert stage.witnesses[name].is_sure(doubt) is (name == A)
    doubt = stage.doubt(GATEWAY)
    stage.pause(2 * BEAT, A)
    assert stage.witnesses[GATEWAY].is_sure(doubt)
    assert stage.doubt(GATEWAY) is not None


def test_who_missed_that_it_was_given_back_believes_it_with_the_next_card(stage: Stage) -> None:
    running = stage.running_on_a()
    back = stage.write(A, lost(running))
    assert stage.doubt(B) is None
    stage.write(B, back.but(holder=B, epoch=2, state=JobState.RUNNING))
    doubt = stage.doubt(GATEWAY)
    assert doubt is not None
    assert not stage.witnesses[GATEWAY].is_sure(doubt)
    del stage.runs[A]
    stage.beat(A)
    assert stage.doubt(GATEWAY) is None


def test_who_missed_a_handover_believes_its_deed(stage: Stage) -> None:
    """The source may still say that it runs the job, until the destination does."""
    running = stage.running_on_a()
    given = stage.write(A, running.but(handover_to=B))
    assert stage.doubt(B) is None
    taken = stage.write(B, given.but(holder=B, epoch=2, handover_to=None))
    assert stage.doubt(GATEWAY) is None
    # A deed is for one node and one epoch.
    version = dataclasses.replace(stage.read(C), held_by=C)
    assert not stage.witnesses[C]._has_deed(version, A, 1)
    assert not stage.witnesses[C]._has_deed(stage.read(C), A, 2)
    assert taken.epoch == 2


def test_who_was_handed_something_else_than_is_stored_may_not_take_it(stage: Stage) -> None:
    running = stage.running_on_a()
    witness = stage.witnesses[B]
    free = running.but(holder=B, epoch=2)
    assert not witness.may_write(free)
    stage.write(A, lost(running))
    assert stage.doubt(B) is None
    assert witness.may_write(free)
    assert not witness.may_write(free.but(spec=dataclasses.replace(SPEC, command=("false",))))


def test_who_has_just_started_is_told_by_living_nodes_of_a_later_epoch(stage: Stage) -> None:
    """Somebody has stored again what was true before the job was claimed."""
    submitted = stage.write(GATEWAY, JobRecord(id=JOB, spec=SPEC, submitted_at=1))
    first = stage.stored
    stage.write(A, submitted.but(holder=A, epoch=1, state=JobState.RUNNING))
    stage.stored = first
    assert stage.doubt(C, follows=False) is None
    stage.runs[A] = 1
    stage.beat(A)
    doubt = stage.doubt(C, follows=False)
    assert doubt is not None
    assert "later epoch" in doubt.reason
    stage.now += LEASE
    assert stage.doubt(C, follows=False) is None


def test_a_store_that_was_restored_from_a_backup_is_believed(stage: Stage) -> None:
    running = stage.running_on_a()
    saved = stage.stored
    stage.write(A, running.but(holder=None, state=JobState.COMPLETED))
    assert stage.doubt(GATEWAY) is None
    stage.stored = saved
    assert stage.doubt(GATEWAY) is not None
    stage.witnesses[GATEWAY].begin_anew(JOB, running.revision)
    assert stage.doubt(GATEWAY) is None


def test_a_card_says_by_which_key_its_node_is_known(stage: Stage) -> None:
    """A node that was set up anew has another one: what it wrote before nobody can check, and what
    is written in its name since is not believed."""
    running = stage.running_on_a()
    ended = running.but(holder=None, state=JobState.COMPLETED)
    stage.write(A, ended)
    stage.now += SECOND
    anew = dataclasses.replace(new_key(A), since=stage.now)
    for name in (GATEWAY, B):
        stage.witnesses[name].hear(Card(node=A, key=anew.public, key_since=anew.since), stage.now)
        stage.witnesses[name].put_aside(JOB)
    assert stage.doubt(B) is None
    assert stage.stored is not None
    stage.stored = (*stage.stored[:3], stage.now + SECOND)
    doubt = stage.doubt(GATEWAY)
    assert doubt is not None
    assert "signature" in doubt.reason


def test_a_node_that_everybody_has_forgotten_is_believed_about_old_times_only(
    stage: Stage, authority: ca.Authority
) -> None:
    running = stage.running_on_a()
    stage.write(A, running.but(holder=None, state=JobState.COMPLETED))
    later = Stage(authority)
    later.stored = stage.stored
    for witness in later.witnesses.values():
        del witness._peers[A]
    assert later.doubt(B) is not None
    later.now += KEPT_CARD + SECOND
    assert later.doubt(B) is None
    # The campus is never forgotten.
    record, value, _, at = later.stored
    later.stored = (record, value, f"{GATEWAY} 9 - - AAAA", at)
    assert later.doubt(C) is not None


def test_a_campus_that_seals_nothing_yet_is_believed_until_the_first_seal(
    authority: ca.Authority,
) -> None:
    learned: list[bool] = []
    stage = Stage(authority, strict=False, on_strict=lambda: learned.append(True))
    plain = JobRecord(id=JobId("j-0"), spec=SPEC, submitted_at=1)
    value = encode_record(plain)
    witness = stage.witnesses[B]
    unsigned = witness.opened(plain, value, "", stored_at=stage.now)
    assert witness.doubt(unsigned, follows=True) is None
    assert witness.is_sealed(plain)
    stage.write(GATEWAY, JobRecord(id=JOB, spec=SPEC, submitted_at=1))
    assert stage.doubt(B) is None
    assert learned == [True]
    assert witness.doubt(unsigned, follows=True) is not None
    assert not witness.is_sealed(plain)


def test_a_seal_is_on_all_that_was_asked_for_and_on_nothing_else(authority: ca.Authority) -> None:
    record = JobRecord(id=JOB, spec=SPEC, submitted_at=1)
    same = record.but(step=9, holder=A, reason="elsewhere")
    assert job_words(record) == job_words(same)
    other = dataclasses.replace(record, id=JobId("j-2"))
    assert job_words(record) != job_words(other)
    for field in dataclasses.fields(JobSpec):
        value = getattr(SPEC, field.name)
        changed = dataclasses.replace(SPEC, **{field.name: ("other",) if not value else None})
        assert job_words(record) != job_words(record.but(spec=changed)), field.name
    # What a later version adds, and a job does not use, leaves seals as they are.
    assert b"talk" not in job_words(record)


@pytest.mark.parametrize(
    "mark", ["", "a", "a 1 a -", "a 1 a - x y", "a -1 a - AAAA", "a 1 a - %%%", "_gateway 1 - - AA"]
)
def test_a_mark_that_says_nothing_is_no_signature(stage: Stage, mark: str) -> None:
    running = stage.running_on_a()
    forged = running.but(holder=None, state=JobState.FAILED, revision=9)
    stage.stored = (forged, encode_record(forged.but(revision=0)), mark, stage.now)
    for name in (GATEWAY, A, B):
        assert stage.doubt(name) is not None


def test_a_signature_is_on_one_key_one_turn_and_these_bytes() -> None:
    key = Key(name=A, seed=new_key(A).seed)
    assert key.sign(b"x") == key.sign(b"x")
    assert key.sign(b"x") != key.sign(b"y")


WAYS = st.lists(
    st.tuples(
        st.sampled_from(["step", "hand", "back", "lost", "cancel"]),
        st.sampled_from([A, B, C]),
        st.booleans(),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(ways=WAYS, end=st.sampled_from([JobState.COMPLETED, JobState.FAILED, None]))
def test_whatever_honest_nodes_do_is_believed_also_by_who_misses_some_of_it(
    authority: ca.Authority, ways: list[tuple[str, NodeId, bool]], end: JobState | None
) -> None:
    stage = Stage(authority)
    record = stage.write(GATEWAY, JobRecord(id=JOB, spec=SPEC, submitted_at=1))
    cancelled = False

    def seen(by_all: bool) -> None:
        """The nodes see everything, the gateway only some of it."""
        names = (GATEWAY, A, B, C) if by_all else (A, B, C)
        for name in names:
            doubt = stage.doubt(name)
            assert doubt is None or name == GATEWAY
            assert doubt is None or not stage.witnesses[name].is_sure(doubt)

    for way, node, by_all in ways:
        if record.holder is None:
            record = stage.write(
                node, record.but(holder=node, epoch=record.epoch + 1, state=JobState.RUNNING)
            )
            stage.runs[node] = record.epoch
            seen(by_all)
        holder = record.holder
        assert holder is not None
        match way:
            case "step":
                record = stage.write(holder, record.but(step=record.step + 1))
            case "back":
                record = stage.write(holder, lost(record))
                stage.runs.pop(holder, None)
            case "hand" if node != holder:
                record = stage.write(holder, record.but(handover_to=node))
                seen(by_all=False)
                record = stage.write(
                    node, record.but(holder=node, epoch=record.epoch + 1, handover_to=None)
                )
                stage.runs[node] = record.epoch
            case "lost" if node != holder:
                others = [name for name in (A, B, C) if name != holder]
                stage.pause(LEASE + BEAT, *others)
                record = stage.write(node, lost(record))
                stage.runs.pop(holder, None)
            case "cancel" if not cancelled and stage.doubt(GATEWAY) is None:
                cancelled = True
                record = stage.write(GATEWAY, record.but(cancel=True))
            case _:
                pass
        seen(by_all)
        for name in list(stage.runs):
            if name != record.holder and name != holder:
                del stage.runs[name]
    if end is not None and record.holder is not None:
        holder = record.holder
        record = stage.write(holder, record.but(holder=None, state=end))
        stage.runs.pop(holder, None)
    stage.runs = {node: epoch for node, epoch in stage.runs.items() if node == record.holder}
    stage.pause(BEAT, A, B, C)
    assert stage.doubt(GATEWAY) is None
