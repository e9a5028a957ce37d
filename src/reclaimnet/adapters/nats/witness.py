"""The witness: whether to believe what is stored of a job, by who wrote it and what is known.

Every node may have to write any record, so the server lets all of them. What keeps a hostile one
from lying is that others do not believe it:

- What a job runs, and for whom, has the campus's seal, and so has the wish to cancel it.
- Each version says who wrote it, and is signed. While a job is held, only its holder's word counts;
  that it completed or failed, only who held it last can say. The gateway may say anything.
- Whoever knows the version before refuses what cannot follow it: an epoch that was over, an ended
  job that lives, a version that was there before, an epoch in other hands.
- A job that is taken out of a living node's hands, as dispatchers do when it falls silent, is not
  taken as long as that node is heard and says that it runs it. Cards are signed by their subject:
  nobody can publish another's.

A version that is not believed is treated as if it had never been written, except that the next one
must follow it in the store. So a holder's next write puts things right, and a gateway does so as
soon as it is sure. Where it cannot be told who is right, the store is: a node that was deaf, or has
just started, believes what is signed and sealed.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from reclaimnet.adapters.nats.access import Key, has_signed, token, untoken
from reclaimnet.adapters.nats.seals import Seal, cancel_words, job_words
from reclaimnet.adapters.nats.streams import KEPT_CARD
from reclaimnet.model.market import Card, JobId, NodeId
from reclaimnet.model.units import SECOND
from reclaimnet.model.work import JobRecord, JobSpec, JobState
from reclaimnet.wire import GATEWAY

MARK: Final = "Rn-Mark"
"""The header with who wrote a version: beside the record, so that its bytes are what is signed and
older programs, which keep only what they know, do no harm to it."""
LEASE: Final = 10 * SECOND
"""A node that is not heard for so long may have lost its jobs by right; if it does not say."""
SURE_AFTER: Final = 2
"""Cards of a holder that say after a version was stored that it is not true: the first of them may
have been under way already."""
KNOWN_SEALS: Final = 1 << 11
"""Seals that need not be checked again; each keeps what it is on in memory."""
MAX_ENDED: Final = 1 << 18
"""Ended jobs that a witness remembers to have ended."""
MAX_TURN: Final = 1 << 53
NOBODY: Final = NodeId("")
_NOTHING: Final = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One version of a record, and who answers for it."""

    record: JobRecord
    by: NodeId = NOBODY
    """Empty: written by an older program, or before the campus sealed its jobs."""
    turn: int = 0
    """Each one's is higher than that of the one before."""
    held_by: NodeId | None = None
    """Who has, or last had, the record's epoch."""
    deed: str = ""
    """By which the holder of the epoch before has handed the job to `held_by`."""
    is_signed: bool = False
    """What it says of its writer is true."""
    unasked: bool = False
    """Nobody could be asked who its writer is."""
    bare: bool = False
    """It is stored without the campus's seal."""
    fleeting: bool = False
    """The store was told to forget it, though the job has not ended."""
    stored_at: int = 0
    """By the server's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """Why a version is not believed."""

    reason: str
    unasked: bool = False
    """Nobody could be asked who its writer is."""
    victim: NodeId | None = None
    """Who has to be heard again before anybody can be sure."""
    heard: int = 0
    """Cards of the victim heard by then."""


@dataclass(slots=True)
class _Peer:
    """What is known of a node from its cards."""

    key: str = ""
    key_since: int = 0
    lease: int = LEASE
    runs: Mapping[JobId, int] = field(default_factory=dict)
    """The epochs of the jobs that it says it runs."""
    cards: int = 0
    heard_at: int = 0
    """By our own clock."""
    stored_at: int = 0
    since: int = 0
    """From when on it was heard without a gap, by our own clock."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is believed of a job."""

    version: Version
    at: int
    """Since when, by our own clock."""
    turn: int
    """The highest that was seen, believed or not: whoever believed that one must see the next."""


class Witness:
    """One for each program on the campus. It forgets what it knew when the program ends."""

    def __init__(
        self,
        me: NodeId,
        *,
        key: Key,
        seal: Seal,
        strict: bool = True,
        sealed_since: int = 0,
        on_strict: Callable[[], None] = lambda: None,
        lease: int = LEASE,
        clock: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        """Not `strict`: on a campus that has not begun to seal its jobs, all is believed until the
        first seal is seen, and `on_strict` called then. What was stored before `sealed_since` needs
        none."""
        self.me = me
        self.strict = strict
        self._on_strict = on_strict
        self._key = key
        self._public = "" if seal.can_sign else key.public
        self._seal = seal
        self._sealed_since = sealed_since
        self._lease = lease
        self._clock = clock
        self._wall = wall
        self._peers: dict[NodeId, _Peer] = {}
        self._running: dict[JobId, set[NodeId]] = {}
        """Who says that they run a job."""
        self._known: dict[JobId, Known] = {}
        self._ended: OrderedDict[JobId, tuple[int, int]] = OrderedDict()
        """Jobs that have ended, with turn and revision of their last version."""
        self._holds_seal = lru_cache(KNOWN_SEALS)(self._check_seal)

    @property
    def is_campus(self) -> bool:
        return self._seal.can_sign

    # --- what is heard ---------------------------------------------------------------------

    def introduce(self, card: Card) -> Card:
        """Our own card, with what others know our word by."""
        return replace(card, key=self._public, key_since=self._key.since, lease=self._lease)

    def meet(self, card: Card) -> bool:
        """A card that was read and not heard says who somebody is, not how they are. Whether that
        is news."""
        peer = self._peers.setdefault(card.node, _Peer())
        before = peer.key
        peer.key, peer.key_since, peer.lease = card.key, card.key_since, card.lease or LEASE
        return card.key != before

    def hear(self, card: Card, stored_at: int, age: int = 0) -> None:
        """A card that was stored then, and `age` ago."""
        self.meet(card)
        peer = self._peers[card.node]
        now = self._clock() - age
        # By the longer of two clocks: who is said to have been silent gets the blame.
        if max(now - peer.heard_at, stored_at - peer.stored_at) >= peer.lease or not peer.cards:
            peer.since = now
        peer.cards += 1
        peer.heard_at, peer.stored_at = now, stored_at
        runs = {progress.job: progress.epoch for progress in card.jobs}
        if runs != peer.runs:
            for job in peer.runs.keys() - runs.keys():
                self._running[job].discard(card.node)
                if not self._running[job]:
                    del self._running[job]
            for job in runs:
                self._running.setdefault(job, set()).add(card.node)
            peer.runs = runs

    def _lives(self, node: NodeId) -> bool:
        peer = self._peers.get(node)
        if peer is None or not peer.cards:
            return False
        return self._clock() - peer.heard_at < peer.lease

    # --- what is written -------------------------------------------------------------------

    def knows_before(self, record: JobRecord) -> bool:
        """Whether we know the version that this one is to replace."""
        if not self.strict or not record.revision:
            return True
        known = self.known(record.id)
        return known is not None and known.record.revision == record.revision

    def may_write(self, record: JobRecord) -> bool:
        """Whether others could believe it: who was only told that a job is to be had may have been
        lied to, about what it runs or whose it is."""
        known = self.known(record.id)
        if known is None or not self.strict:
            return True
        before = known.record
        if before.state.terminal or before.spec != record.spec:
            return False
        if record.holder != self.me or (before.holder == self.me and before.epoch == record.epoch):
            return True
        is_free = before.holder is None or before.handover_to == self.me
        return is_free and before.checkpoints == record.checkpoints

    def complete(self, record: JobRecord) -> JobRecord:
        """With all the seals that we can put on it, or know."""
        known = self.known(record.id)
        seal, cancel_seal = record.seal, record.cancel_seal
        if self._seal.can_sign:
            seal = seal or self._seal.sign(job_words(record))
            if record.cancel:
                cancel_seal = cancel_seal or self._seal.sign(cancel_words(record))
        elif known is not None and known.record.spec == record.spec:
            seal = seal or known.record.seal
            cancel_seal = cancel_seal or (known.record.cancel_seal if record.cancel else "")
        return record.but(seal=seal, cancel_seal=cancel_seal)

    def signed(self, record: JobRecord, value: bytes, *, after: int = 0) -> tuple[Version, str]:
        """The version that we are about to write as these bytes, and its mark."""
        known = self._known.get(record.id)
        before = known.version if known is not None else Version(record=record)
        seen = known.turn if known is not None else self._ended.get(record.id, (0, 0))[0]
        held_by = record.holder or before.held_by
        deed = before.deed if record.holder == self.me else ""
        if record.handover_to is not None and record.holder == self.me:
            deed = self._key.sign(_deed_words(record.id, record.epoch, record.handover_to))
        version = Version(
            record=record,
            by=self.me,
            turn=max(seen, after) + 1,
            held_by=held_by,
            deed=deed,
            is_signed=True,
        )
        words = _mark_words(version, value)
        signature = self._seal.sign(words) if self._seal.can_sign else self._key.sign(words)
        return version, f"{_packed(version)} {signature}"

    # --- what is read ----------------------------------------------------------------------

    def opened(
        self, record: JobRecord, value: bytes, mark: str, *, stored_at: int, fleeting: bool = False
    ) -> Version:
        """The version that was stored as these bytes."""
        known = self.known(record.id)
        bare = not record.seal
        if bare and known is not None and known.record.spec == record.spec:
            # An older program has dropped what it does not know of.
            record = record.but(seal=known.record.seal, cancel_seal=known.record.cancel_seal)
        unsigned = Version(
            record=record,
            bare=bare,
            fleeting=fleeting,
            # An older program neither counts nor says who held it.
            turn=known.turn + 1 if known else 0,
            held_by=record.holder or (known.held_by if known else None),
            stored_at=stored_at,
        )
        words = mark.split(" ")
        if len(words) != 5 or not words[1].isdecimal() or len(words[1]) > len(str(MAX_TURN)):
            return unsigned
        by, turn, held_by, deed, signature = words
        version = replace(
            unsigned,
            by=NodeId(untoken(by)),
            turn=int(turn),
            held_by=None if held_by == _NOTHING else NodeId(untoken(held_by)),
            deed="" if deed == _NOTHING else deed,
        )
        return replace(version, is_signed=self._is_word_of(version, value, signature))

    def _is_word_of(self, version: Version, value: bytes, signature: str) -> bool:
        words = _mark_words(version, value)
        if version.by == GATEWAY:
            return self._seal.holds(words, signature)
        # Who has just started knows its own hand, also while nobody can be asked.
        if version.by == self.me and has_signed(self._public, words, signature):
            return True
        peer = self._peers.get(version.by)
        return peer is not None and has_signed(peer.key, words, signature)

    def doubt(self, version: Version, *, follows: bool) -> Doubt | None:
        """Why it is not to be believed; None if it is. Who `follows` all versions can wait until
        it is clear who is right; who needs an answer now is told what the store says."""
        if not self.strict:
            self._learn_of_seals(version.record)
            return None
        wrong = self._wrong_papers(version) or _overreach(version)
        if wrong:
            return Doubt(reason=wrong, unasked=version.unasked)
        job, by_campus = version.record.id, version.by == GATEWAY
        known = self._known.get(job)
        ended, _ = self._ended.get(job, (0, 0))
        if ended and (version.turn < ended or not (by_campus or version.turn == ended)):
            return Doubt(reason="the job has ended")
        if known is None:
            # Also the campus's own word may be an old one, stored again by somebody else.
            return self._contradicted(version, follows=follows and not by_campus)
        wrong = _cannot_follow(known.version, version)
        if wrong:
            return Doubt(reason=wrong)
        if by_campus:
            return None
        victim = self._taken_from(known.version, version)
        if victim is None or not self._insists(victim, known):
            return None
        reason = f"it takes the job from {victim}, which was never silent and still has it"
        return Doubt(reason=reason, victim=victim, heard=self._peers[victim].cards)

    def is_sure(self, doubt: Doubt) -> bool:
        """Whether nothing that is on its way could change it."""
        if doubt.victim is None or doubt.victim == self.me:
            return not doubt.unasked
        return self._peers[doubt.victim].cards >= doubt.heard + SURE_AFTER

    def is_sealed(self, record: JobRecord) -> bool:
        """Whether the campus has said what runs here; also of a record that was only told."""
        if not self.strict:
            return True
        sealed = self._holds_seal(record.seal, record.id, record.submitted_at, record.spec)
        return sealed and (not record.cancel or self._is_cancelled(record))

    def known(self, job: JobId) -> Version | None:
        """What is believed now."""
        known = self._known.get(job)
        return known.version if known is not None else None

    def note(self, version: Version) -> None:
        """It is believed, or was written by ourselves."""
        job = version.record.id
        before = self._known.pop(job, None)
        if version.record.state.terminal:
            # Of those nothing is asked any more but that they stay so.
            self._ended[job] = version.turn, version.record.revision
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)
            return
        self._ended.pop(job, None)
        turn = max(version.turn, before.turn if before is not None else 0)
        self._known[job] = Known(version, self._clock(), turn)

    def pass_over(self, version: Version) -> JobRecord | None:
        """What is believed in the place of a version that is not, if anything is known: the next
        one must follow that one in the store all the same."""
        known = self._known.get(version.record.id)
        if known is None:
            return None
        record = known.version.record.but(revision=version.record.revision)
        turn = max(known.turn, version.turn) if version.turn < MAX_TURN // 2 else known.turn
        self._known[record.id] = Known(replace(known.version, record=record), known.at, turn)
        return record

    def begin_anew(self, job: JobId, revision: int) -> None:
        """A store whose numbers go back was restored from a backup: what was later is not true any
        more. Nodes cannot bring that about."""
        known = self.known(job)
        if known is not None and known.record.revision > revision:
            del self._known[job]
        if self._ended.get(job, (0, 0))[1] > revision:
            del self._ended[job]

    def put_aside(self, job: JobId) -> Known | None:
        """Nothing is known of it while it is being written; for `put_back`."""
        return self._known.pop(job, None)

    def put_back(self, known: Known | None) -> None:
        if known is not None:
            self._known.setdefault(known.version.record.id, known)

    def forget_others(self) -> None:
        """Who follows no longer knows only what it holds itself."""
        mine = {job: k for job, k in self._known.items() if k.version.record.holder == self.me}
        self._known = mine
        self._ended.clear()

    # --- the rules -------------------------------------------------------------------------

    def needs_seal(self, version: Version) -> bool:
        """Whether it is believed without one: the campus should put one on it."""
        return self.is_campus and version.bare and not version.record.state.terminal

    def _learn_of_seals(self, record: JobRecord) -> None:
        sealed = record.seal, record.id, record.submitted_at, record.spec
        if record.seal and self._holds_seal(*sealed):
            self.strict = True
            self._on_strict()

    def _wrong_papers(self, version: Version) -> str:
        record = version.record
        if version.stored_at and version.stored_at < self._sealed_since:
            return ""
        if not version.is_signed and not self._cannot_sign(version):
            if version.unasked:
                return f"{version.by or record.holder} could not be asked for its key just now"
            return f"the signature of {version.by} is not its own" if version.by else "unsigned"
        if version.by == GATEWAY:
            return ""
        if version.bare and version.by:
            return "it has no seal of the campus"
        if not self._holds_seal(record.seal, record.id, record.submitted_at, record.spec):
            return "its seal is not the campus's, or what it runs was changed"
        if record.cancel and version.by != version.held_by and not self._is_cancelled(record):
            return "its user has not cancelled it"
        return ""

    def _cannot_sign(self, version: Version) -> bool:
        """Of a program that is older than signatures, or of a key that nobody can know any more."""
        if not version.by:
            holder = version.held_by
            peer = self._peers.get(holder) if holder is not None else None
            return peer is not None and peer.cards > 0 and not peer.key
        peer = self._peers.get(version.by)
        if version.by == GATEWAY:
            return False
        if peer is None:
            return 0 < version.stored_at < self._wall() - KEPT_CARD
        return 0 < version.stored_at < peer.key_since

    def _contradicted(self, version: Version, *, follows: bool) -> Doubt | None:
        """By what living nodes say of themselves, where nothing else is known."""
        record = version.record
        for node in sorted(self._running.get(record.id, ())):
            epoch = self._peers[node].runs[record.id]
            ours = node == version.held_by or (node in record.seats and epoch == record.epoch)
            if ours or not self._lives(node):
                continue
            if epoch > record.epoch:
                return Doubt(reason=f"{node} runs it already, in a later epoch")
            if follows and not self._has_deed(version, node, epoch):
                reason = f"{node} says that it runs the job"
                return Doubt(reason=reason, victim=node, heard=self._peers[node].cards)
        return None

    def _taken_from(self, before: Version, after: Version) -> NodeId | None:
        """Who held it and has not given it away."""
        holder = before.record.holder
        if holder is None or (after.by or after.held_by) == holder:
            return None
        offered = before.record.handover_to
        next_one = after.record.epoch == before.record.epoch + 1
        if next_one and offered is not None and after.held_by == offered:
            return None
        if next_one and self._has_deed(after, holder, before.record.epoch):
            return None
        return holder

    def _has_deed(self, after: Version, holder: NodeId, epoch: int) -> bool:
        peer = self._peers.get(holder)
        if peer is None or after.held_by is None or not after.deed:
            return False
        words = _deed_words(after.record.id, epoch, after.held_by)
        return has_signed(peer.key, words, after.deed)

    def _insists(self, holder: NodeId, known: Known) -> bool:
        """It was heard all the time, and says that it has the job; of ourselves we know."""
        peer = self._peers.get(holder)
        if peer is None or not self._lives(holder) or peer.since > known.at:
            return False
        record = known.version.record
        return holder == self.me or peer.runs.get(record.id) == record.epoch

    def _is_cancelled(self, record: JobRecord) -> bool:
        return self._seal.holds(cancel_words(record), record.cancel_seal)

    def _check_seal(self, seal: str, job: JobId, submitted_at: int, spec: JobSpec) -> bool:
        record = JobRecord(id=job, spec=spec, submitted_at=submitted_at)
        return self._seal.holds(job_words(record), seal)


def _overreach(version: Version) -> str:
    """What its writer had no right to say, whatever was before."""
    record, by = version.record, version.by or version.held_by
    if version.turn >= MAX_TURN:
        return "it counts too far"
    if version.fleeting:
        return "it is to vanish before the job has ended"
    if by == GATEWAY:
        return ""
    if record.holder is not None and (by != record.holder or by != version.held_by):
        return f"{by} wrote it, and {record.holder} holds the job"
    if by != version.held_by and record.state not in (JobState.PENDING, JobState.CANCELLED):
        return f"{by} says that it is {record.state}, and never held it"
    if record.state is JobState.CANCELLED and by != version.held_by and not record.cancel:
        return "its user has not cancelled it"
    return ""


def _cannot_follow(before: Version, after: Version) -> str:
    old, new = before.record, after.record
    # The revision does not tell: one that was passed over has left its own behind.
    if after.turn <= before.turn and new.but(revision=old.revision) != old:
        return "it was there before"
    if new.epoch > old.epoch or after.by == GATEWAY:
        return ""
    if new.epoch < old.epoch:
        return f"epoch {new.epoch} is over"
    if after.held_by != before.held_by:
        return f"epoch {new.epoch} is {before.held_by}'s"
    if new.holder not in (None, old.holder):
        return f"epoch {new.epoch} was given back"
    return ""


def _packed(version: Version) -> str:
    held_by = _NOTHING if version.held_by is None else token(version.held_by)
    return f"{token(version.by)} {version.turn} {held_by} {version.deed or _NOTHING}"


def _mark_words(version: Version, value: bytes) -> bytes:
    return b"reclaimnet record\n" + _packed(version).encode() + b"\n" + value


def _deed_words(job: JobId, epoch: int, to: NodeId) -> bytes:
    return f"reclaimnet handover\n{job}\n{epoch}\n{to}".encode()
