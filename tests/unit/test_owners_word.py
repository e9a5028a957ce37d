"""The owner's word: what is not said stays as it was, whoever asks, and whatever dies."""

import json
from pathlib import Path

import pytest

from reclaimnet.apps import owners_word
from reclaimnet.apps.live.clock import Clock
from reclaimnet.apps.owners_word import (
    FILE,
    NEVER,
    OwnersWord,
    give_notice,
    is_taken_back,
    take_back,
)
from reclaimnet.engine.provider import Provider
from reclaimnet.errors import UsageError
from reclaimnet.model import events as ev
from reclaimnet.model.asking import LendRequest, ReclaimRequest, WithdrawRequest
from reclaimnet.model.hours import parse_hours
from reclaimnet.model.market import Cause, Gpu, GpuId, JobId, Maintenance, NodeId, Offer, Terms
from reclaimnet.model.orders import Answer
from reclaimnet.model.units import DAY, HOUR, MINUTE, SECOND

GPUS = tuple(Gpu(id=GpuId(f"GPU-lab-{index}"), index=index) for index in range(3))
EVER = parse_hours("mon-sun 00:00-24:00")
STRICT = LendRequest(which=("1",), notice=3 * MINUTE, users=("ada",), hours=EVER, utc_offset=HOUR)


class Lab:
    """One machine, whose agents come and go."""

    def __init__(self, folder: Path, gpus: tuple[Gpu, ...] = GPUS) -> None:
        self.file = folder / FILE
        self.gpus = gpus
        self.clock = Clock()
        self.start()

    def start(self) -> None:
        """Another agent, which knows only what is on disk."""
        self.book = Provider(NodeId("lab"))
        self.word = OwnersWord(node=NodeId("lab"), gpus=self.gpus, file=self.file, clock=self.clock)
        for event in self.word.kept():
            self._deliver(event)
        self.word.keep(self.book)

    def ask(self, request: LendRequest | ReclaimRequest | WithdrawRequest) -> Answer:
        asked = self.word.asked(request, self.book)
        self.word.said_at = self.clock.now()
        return self._deliver(asked)

    def _deliver(self, event: ev.LendAsked | ev.ReclaimAsked | ev.WithdrawAsked) -> Answer:
        now = self.clock.now()
        match event:
            case ev.LendAsked():
                answer = self.book.lend(event, now)
            case ev.ReclaimAsked():
                answer, _ = self.book.reclaim(event, now)
            case ev.WithdrawAsked():
                answer, _ = self.book.withdraw(event, now)
        self.book.expire(now)
        self.word.keep(self.book)
        return answer

    @property
    def lent(self) -> list[int]:
        return [gpu.index for gpu in self.book.offer.gpus] if self.book.offer else []

    @property
    def terms(self) -> Terms:
        assert self.book.standing is not None
        return self.book.standing.terms


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_a_machine_that_was_never_lent_is_lent_whole_on_the_usual_terms(lab: Lab) -> None:
    assert lab.ask(LendRequest()).ok
    assert (lab.lent, lab.terms) == ([0, 1, 2], Terms())


def test_what_is_not_said_stays_as_it_was(lab: Lab) -> None:
    lab.ask(STRICT)
    lab.ask(LendRequest(notice=2 * MINUTE))
    assert lab.lent == [1]
    assert lab.terms == Terms(notice=2 * MINUTE, users=("ada",), hours=EVER, utc_offset=HOUR)
    lab.ask(LendRequest(users=("bob",)))
    assert (lab.terms.users, lab.terms.hours, lab.terms.notice) == (("bob",), EVER, 2 * MINUTE)


def test_everyone_at_any_hour_can_be_said_again(lab: Lab) -> None:
    now = lab.clock.now()
    lab.ask(STRICT)
    lab.ask(LendRequest(maintenance=(Maintenance(begins=now + DAY, ends=now + 2 * DAY),)))
    lab.ask(LendRequest(ends=now + 9 * DAY))
    lab.ask(LendRequest(users=(), hours=(), maintenance=(), ends=0))
    assert lab.terms == Terms(notice=3 * MINUTE)


def test_how_many_means_those_that_are_lent_first(lab: Lab) -> None:
    lab.ask(LendRequest(which=("1",)))
    lab.ask(LendRequest(gpus=1))
    assert lab.lent == [1]
    lab.ask(LendRequest(gpus=2))
    assert lab.lent == [0, 1]


def test_who_takes_back_what_is_back_learns_what_others_still_fetch_and_how_that_ends() -> None:
    book = Provider(NodeId("lab"))

    def reclaim(now: int, grace: int | None = None) -> Answer:
        answer, _ = book.reclaim(ev.ReclaimAsked(request="r", grace=grace), now)
        book.expire(now)
        return answer

    nothing = "lab lends nothing, so there is nothing to take back."
    assert reclaim(0, grace=0) == Answer(request="r", ok=False, text=nothing)
    offer = Offer(provider="ada", gpus=GPUS, terms=Terms(notice=MINUTE))
    book.lend(ev.LendAsked(request="r", offer=offer), 0)
    assert reclaim(0).text == "3 GPUs of lab are yours now."
    still = (
        "lab lends nothing, so there is nothing to take back. For 50s other machines may still "
        "fetch the checkpoints that it keeps; `rn reclaim --now` ends that, too."
    )
    assert reclaim(10 * SECOND) == Answer(request="r", ok=False, text=still)
    sooner = (
        "No GPU of lab was lent any more. Other machines may fetch the checkpoints that it keeps "
        "for another 5s, and then no more."
    )
    assert reclaim(10 * SECOND, grace=5 * SECOND) == Answer(request="r", ok=True, text=sooner)
    ended = (
        "No GPU of lab was lent any more. Other machines could still fetch the checkpoints that it "
        "keeps, and from now on cannot."
    )
    assert reclaim(11 * SECOND, grace=0) == Answer(request="r", ok=True, text=ended)
    assert reclaim(11 * SECOND, grace=0) == Answer(request="r", ok=False, text=nothing)


def test_none_cannot_be_lent_and_the_way_to_do_so_is_named(lab: Lab) -> None:
    with pytest.raises(UsageError, match="rn reclaim"):
        lab.ask(LendRequest(gpus=0))
    with pytest.raises(UsageError, match="cannot lend 4"):
        lab.ask(LendRequest(gpus=4))


def test_lent_again_it_is_what_was_lent_before(lab: Lab) -> None:
    lab.ask(STRICT)
    before = lab.book.offer
    lab.ask(ReclaimRequest(grace=0))
    assert lab.lent == []
    assert lab.ask(LendRequest()).ok
    assert lab.book.offer == before


def test_what_was_taken_back_alone_is_not_lent_with_the_rest(lab: Lab) -> None:
    lab.ask(LendRequest())
    lab.ask(ReclaimRequest(gpus=("0",), grace=0))
    lab.ask(ReclaimRequest(grace=0))
    lab.ask(LendRequest())
    assert lab.lent == [1, 2]


def test_the_next_agent_knows_what_was_lent_and_taken_back(lab: Lab) -> None:
    lab.ask(STRICT)
    lab.ask(ReclaimRequest(grace=0))
    for _ in range(2):
        lab.start()
        assert lab.lent == []
        assert lab.word.said_at != NEVER, "an option of the agent's does not count any more"
    lab.ask(LendRequest())
    assert (lab.lent, lab.terms.users) == ([1], ("ada",))


def test_only_what_the_owner_took_back_is_told_at_the_start(lab: Lab) -> None:
    assert lab.word.said_at == NEVER
    assert not is_taken_back(lab.file), "an agent has lived here, but nobody has said anything"
    lab.ask(LendRequest())
    assert not is_taken_back(lab.file)
    lab.ask(ReclaimRequest(grace=0))
    assert is_taken_back(lab.file)


@pytest.mark.parametrize("text", ["", "[]", '{"offer": 7}', '{"offer": null, "notices": []}'])
def test_a_word_that_cannot_be_read_counts_as_one(tmp_path: Path, text: str) -> None:
    """The last is an older agent's, which wrote the same for never lent and taken back."""
    (tmp_path / FILE).write_text(text)
    lab = Lab(tmp_path)
    lab.start()
    assert lab.lent == []
    assert lab.word.said_at != NEVER


def test_outside_its_hours_it_waits_for_them_and_does_not_forget(lab: Lab) -> None:
    now = lab.clock.now()
    window = Maintenance(begins=now - HOUR, ends=now + HOUR)
    lab.ask(LendRequest(notice=5 * SECOND, maintenance=(window,)))
    lab.start()
    assert lab.lent == []
    assert lab.book.opens_at() == window.ends
    assert lab.terms.notice == 5 * SECOND
    assert lab.word.said_at != NEVER


def test_what_would_be_lent_by_itself_can_be_taken_back(lab: Lab) -> None:
    now = lab.clock.now()
    lab.ask(LendRequest(maintenance=(Maintenance(begins=now - HOUR, ends=now + HOUR),)))
    assert lab.ask(ReclaimRequest(gpus=("0",))).ok
    assert lab.ask(ReclaimRequest()).ok
    assert lab.book.opens_at() is None
    assert lab.book.standing is None
    lab.start()
    assert lab.book.standing is None


def test_an_agent_that_ends_leaves_the_loan_to_the_next(lab: Lab) -> None:
    """Its guests leave as in a reclaim, but the owner has not said so."""
    lab.ask(LendRequest())
    lab.book.adopt(JobId("j"), (GPUS[0].id,), lab.clock.now())
    lab.ask(ReclaimRequest(gpus=("0",), grace=HOUR))
    lab.word.part(lab.book)
    lab._deliver(ev.ReclaimAsked(request="q", grace=MINUTE, reason="the agent is stopping"))
    assert {len(notice["gpus"]) for notice in json.loads(lab.file.read_text())["notices"]} == {1, 3}
    lab.book.release(JobId("j"))
    lab.book.expire(lab.clock.now())
    lab.word.keep(lab.book)
    lab.start()
    assert lab.lent == [1, 2], "the owner had asked the first one back"


def test_an_agent_that_is_stopped_leaves_the_loan_to_the_next_at_any_moment(lab: Lab) -> None:
    """Also if it has ended before its notice has."""
    lab.ask(LendRequest())
    lab.book.adopt(JobId("j"), (GPUS[0].id,), lab.clock.now())
    lab._deliver(ev.ReclaimAsked(request="q", grace=MINUTE, cause=Cause.STOP))
    assert json.loads(lab.file.read_text())["notices"]
    lab.start()
    lab.book.expire(lab.clock.now())
    assert lab.lent == [0, 1, 2]


def test_the_owner_has_the_last_word_while_the_agent_ends(lab: Lab) -> None:
    lab.ask(LendRequest())
    lab.word.part(lab.book)
    lab.ask(ReclaimRequest(grace=0))
    lab.start()
    assert lab.lent == []


def test_who_practises_does_not_undo_what_the_owner_has_said_since(lab: Lab) -> None:
    lab.ask(LendRequest())
    lab.ask(ReclaimRequest(gpus=("1",), grace=0, reason="a rehearsal"))
    seen = lab.word.said_at
    lab.start()
    again = LendRequest(which=tuple(gpu.id for gpu in GPUS), as_of=seen)
    lab.ask(ReclaimRequest(gpus=("0",), grace=0))
    with pytest.raises(UsageError, match="something else since"):
        lab.ask(again)
    assert lab.lent == [2]
    lab.ask(LendRequest(which=again.which, as_of=lab.word.said_at))
    assert lab.lent == [0, 1, 2]


def test_who_acts_for_the_owner_takes_nothing_back_that_the_owner_has_said_since(lab: Lab) -> None:
    """As a controller of Kubernetes does, whose cordon is over."""
    lab.ask(LendRequest(as_of=0))
    assert lab.lent == [0, 1, 2], "nobody had said anything"
    lab.ask(ReclaimRequest(grace=HOUR, reason="cordoned"))
    seen = lab.word.said_at
    assert lab.word.asked(WithdrawRequest(as_of=seen), lab.book)
    lab.ask(LendRequest())
    lab.ask(ReclaimRequest(grace=MINUTE))
    for request in (WithdrawRequest(as_of=seen), LendRequest(as_of=seen)):
        with pytest.raises(UsageError, match="something else since"):
            lab.ask(request)
    assert lab.lent == []


def test_who_has_spoken_to_an_agent_whose_folder_is_lost_may_lend_it_anew(lab: Lab) -> None:
    lab.ask(LendRequest())
    lab.ask(ReclaimRequest(grace=0))
    seen = lab.word.said_at
    lab.file.unlink()
    lab.start()
    lab.ask(LendRequest(as_of=seen))
    assert lab.lent == [0, 1, 2]


def test_of_several_notices_on_the_same_gpus_the_one_that_holds_is_changed(lab: Lab) -> None:
    lab.ask(LendRequest())
    lab.book.adopt(JobId("j"), (GPUS[0].id,), lab.clock.now())
    for grace in (MINUTE, HOUR):
        assert lab.ask(ReclaimRequest(grace=grace)).ok
    assert lab.ask(ReclaimRequest(grace=2 * HOUR, change=True)).ok
    graces = sorted(notice.grace for notice in lab.book.notices.values())
    assert graces == [HOUR, 2 * HOUR]


def test_gpus_that_are_gone_are_left_out(tmp_path: Path) -> None:
    Lab(tmp_path).ask(LendRequest(gpus=2, users=("ada",)))
    fewer = Lab(tmp_path, gpus=GPUS[1:])
    assert fewer.lent == [1]
    other = Lab(tmp_path, gpus=(Gpu(id=GpuId("GPU-new"), index=0),))
    assert other.lent == []
    other.ask(LendRequest())
    assert (other.lent, other.terms.users) == ([0], ("ada",))


def test_an_end_that_has_passed_was_that_of_another_loan(lab: Lab) -> None:
    now = lab.clock.now()
    lab.ask(LendRequest(ends=now + HOUR))
    lab.ask(LendRequest(notice=0))
    assert lab.terms.ends == now + HOUR
    lab._deliver(ev.ReclaimAsked(request="q", grace=0, cause=Cause.WALLTIME))
    assert lab.book.said is not None
    lab.clock._offset += 2 * HOUR
    lab.ask(LendRequest())
    assert lab.terms.ends is None


def test_a_refused_word_changes_nothing(lab: Lab) -> None:
    lab.ask(LendRequest())
    now = lab.clock.now()
    assert not lab.ask(LendRequest(ends=now - HOUR)).ok
    assert (lab.lent, lab.terms) == ([0, 1, 2], Terms())


def test_the_answer_repeats_the_terms_and_what_is_not_lent(lab: Lab) -> None:
    lab.ask(LendRequest(which=("1",), users=("ada",), hours=parse_hours("mon-fri 18:00-08:00")))
    assert lab.book.offer is None or lab.lent == [1]
    assert lab.book.standing is not None
    said = lab.word.repeated(lab.book.standing)
    assert said.startswith("To ada only, mon-fri 18:00-08:00")
    assert said.endswith("GPUs 0, 2 stay yours (`rn lend --gpus 3` lends all).")
    lab.ask(LendRequest(gpus=3, users=(), hours=()))
    assert lab.book.standing is not None
    assert lab.word.repeated(lab.book.standing) == "To everyone, at any hour."


def test_what_is_taken_back_while_no_agent_lives_is_not_lent_by_the_next(lab: Lab) -> None:
    lab.ask(STRICT)
    lab.book.adopt(JobId("j"), (GPUS[1].id,), lab.clock.now())
    lab.ask(ReclaimRequest(grace=HOUR))
    assert take_back(lab.file)
    assert is_taken_back(lab.file)
    lab.start()
    assert lab.lent == []
    assert not lab.book.notices
    # What was said before still is what is lent, when the owner says so.
    lab.ask(LendRequest())
    assert (lab.lent, lab.terms.users) == ([1], ("ada",))


def test_where_nothing_was_ever_lent_there_is_nothing_to_write_down(tmp_path: Path) -> None:
    assert take_back(tmp_path / FILE)
    assert not (tmp_path / FILE).exists()


def notices(lab: Lab) -> list[ev.ReclaimAsked]:
    """What the next agent hears that is kept of them."""
    word = OwnersWord(node=NodeId("lab"), gpus=GPUS, file=lab.file, clock=lab.clock)
    return [event for event in word.kept() if isinstance(event, ev.ReclaimAsked)]


@pytest.mark.parametrize("grace", [HOUR, None])
def test_the_next_agent_keeps_the_notice_that_was_given_while_none_lived(
    lab: Lab, grace: int | None
) -> None:
    lab.ask(STRICT)
    spoke = lab.word.said_at
    promised = 3 * MINUTE if grace is None else grace
    assert give_notice(lab.file, grace=grace, reason="a talk") == (promised, True)
    (asked,) = notices(lab)
    assert (asked.gpus, asked.cause, asked.reason) == ((GPUS[1].id,), Cause.RECLAIM, "a talk")
    assert asked.grace is not None
    assert promised - MINUTE < asked.grace <= promised
    lab.start()
    assert lab.word.said_at > spoke


def test_a_notice_that_ran_already_holds_beside_one_that_no_agent_heard(lab: Lab) -> None:
    lab.ask(STRICT)
    lab.book.adopt(JobId("j"), (GPUS[1].id,), lab.clock.now())
    lab.ask(ReclaimRequest(grace=MINUTE))
    # The machine was started anew meanwhile.
    kept = json.loads(lab.file.read_text())
    lab.file.write_text(json.dumps({**kept, "boot": "another"}))
    assert give_notice(lab.file, grace=HOUR, reason="") == (HOUR, True)
    first, second = (asked.grace for asked in notices(lab))
    assert first is not None
    assert second is not None
    assert 0 < first <= MINUTE < second <= HOUR


@pytest.mark.parametrize("word", [None, "{", '{"offer": null, "notices": []}'])
def test_where_nothing_is_lent_no_notice_is_given(tmp_path: Path, word: str | None) -> None:
    if word is not None:
        (tmp_path / FILE).write_text(word)
    assert give_notice(tmp_path / FILE, grace=HOUR, reason="") is None


def test_a_notice_that_cannot_be_written_down_is_told_as_such(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    lab.ask(STRICT)
    monkeypatch.setattr(owners_word, "write_down", full)
    assert give_notice(lab.file, grace=HOUR, reason="") == (HOUR, False)
