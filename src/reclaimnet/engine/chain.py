"""The mind of a chain: submits the next job in time, hands over when it is healthy, and counts.

It knows no batch system. A world delivers what was seen (`model/chain.py`) and carries out orders;
the state it keeps is written down before an order goes out, so that another one can take over at
any moment.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, assert_never

from reclaimnet.model.chain import (
    AskToSave,
    CancelAsked,
    ChainEvent,
    ChainOrder,
    ChainSpec,
    ChainState,
    EndJobs,
    Handover,
    Link,
    LinkState,
    Look,
    Looked,
    LookFailed,
    NextAsked,
    OpenGate,
    Outlook,
    Phase,
    Queue,
    Say,
    SeenLink,
    Submit,
    SubmitRefused,
    Submitted,
    Woke,
)
from reclaimnet.model.supply import ChainView, RunningJob, Timing
from reclaimnet.model.units import SECOND, show_duration

MAX_FAILURES: Final = 3
"""Jobs in a row that fail soon after their start, before the chain is given up."""
KEPT_LINKS: Final = 16
"""Jobs that are over and still remembered one by one."""
MAX_DOUBLINGS: Final = 10
LOOKS_LEFT: Final = 20
"""The whole queue is looked at no less often than this many times in the time that is left."""
RESOLUTION: Final = SECOND
"""Batch systems count in whole seconds; a gap no longer than that may be none."""
CALM: Final = 5
"""Far from its end a job is looked at so many times less often."""

Choose = Callable[[ChainView], Timing]
"""A policy of `policy/provision.py`: the same object as in simulator and bench."""


class Chain:
    """One per chain; `state` is all that must survive."""

    def __init__(
        self, spec: ChainSpec, choose: Choose, state: ChainState | None = None, *, user: str = ""
    ) -> None:
        self.spec = spec
        self.state = state or ChainState(name=spec.name)
        self._choose = choose
        self._user = user
        self._looking = False
        self._look_at = 0
        self._queue_at = 0
        self._next_look = 0
        """Whatever happens, no look comes before this."""
        self._told: set[tuple[type, int]] = set()
        """Orders that this mind has given; what one before it ordered may never have gone out."""
        self._orders: list[ChainOrder] = []

    def next_wake(self) -> int | None:
        """When to deliver Woke next; None while an answer is awaited, and when all is over."""
        if self._looking or self.state.phase.over:
            return None
        due = min(self._look_at, self._queue_at) if self._chooses() else self._look_at
        return max(due, self._next_look)

    def handle(self, event: ChainEvent, now: int) -> list[ChainOrder]:
        self._orders = []
        match event:
            case Looked():
                self._looking = False
                self._looked(event, now)
            case LookFailed():
                self._looking = False
                self._unanswered(event.why, now)
            case Submitted():
                self._submitted(event, now)
            case SubmitRefused():
                self._refused(event, now)
            case CancelAsked():
                if not self.state.phase.over:
                    self._change(phase=Phase.ENDING, verdict=Phase.CANCELLED)
                    self._look(now)
            case NextAsked():
                if self.state.phase is Phase.ACTIVE:
                    self._change(next_asked=True)
                    self._look(now)
            case Woke():
                self._look(now)
            case _:
                assert_never(event)
        return self._orders

    # --- looking ----------------------------------------------------------------------------

    def _look(self, now: int) -> None:
        if self._looking or self.state.phase.over:
            return
        self._looking = True
        self._next_look = now + self.spec.tempo.handover_look
        whole = self._chooses() and now >= self._queue_at
        self._orders.append(Look(whole_queue=whole))

    def _chooses(self) -> bool:
        """Whether there is a choice to make: a job runs and nothing is on its way after it."""
        live = self._live()
        return (
            self.state.phase is Phase.ACTIVE
            and self.state.submitting is None
            and bool(live)
            and live[-1].state is LinkState.RUNNING
        )

    def _unanswered(self, why: str, now: int) -> None:
        since = self.state.silent_since
        self._change(silent_since=now if since is None else since)
        for_ = show_duration(now - (self.state.silent_since or now))
        self._say(f"the batch system has not answered for {for_} ({why}); asking again", once=True)
        self._look_at = now + self.spec.tempo.look
        self._next_look = self._look_at

    def _looked(self, event: Looked, now: int) -> None:
        if self.state.silent_since is not None:
            self._change(silent_since=None)
            self._say("the batch system answers again")
        before = {link.number: link for link in self.state.links}
        self._merge(event.links, now)
        changed = [
            link
            for link in self.state.links
            if link.state.over and not (link.number in before and before[link.number].state.over)
        ]
        seen = {link.number: link for link in event.links}
        if self.state.phase is Phase.ACTIVE:
            self._reckon(changed, now)
        if self.state.phase is Phase.ACTIVE:
            self._drop_hopeless(seen, now)
            self._hand_over(seen, now)
            self._provide(event.queue, now)
        if self.state.phase is Phase.ENDING:
            self._end()
        self._fold()
        self._look_at = now + self._pause(now)

    def _merge(self, seen: tuple[SeenLink, ...], now: int) -> None:
        """What was seen replaces what was believed; what is not seen any more is over."""
        known = {link.number: link for link in self.state.links}
        shown = {link.number for link in seen}
        for one in seen:
            known[one.number] = self._updated(known.get(one.number), one, now)
        for number, link in known.items():
            if number not in shown and not link.state.over:
                known[number] = _vanished(link, now)
        submitting = self.state.submitting
        if submitting is not None and (submitting in shown or now >= self.state.retry_at):
            # Either the doubtful submission was accepted, or enough time has passed without it.
            accepted = submitting in shown
            self._change(submitting=None, tries=0 if accepted else self.state.tries)
        self._change(
            links=tuple(known[number] for number in sorted(known)),
            count=max([self.state.count, *known]),
        )

    def _updated(self, link: Link | None, seen: SeenLink, now: int) -> Link:
        state = seen.state
        if link is None:
            link = Link(
                number=seen.number,
                id=seen.id,
                state=state,
                submitted=seen.submitted,
                limit=seen.limit,
            )
        elif link.state.over:
            return link
        left = link.leaving is not None or link.killed is not None
        saves = self.spec.handover is Handover.SAVE
        if left and state.over and not (saves and state is LinkState.DONE):
            state = LinkState.TO_GO_ON
        ended = seen.ended if seen.ended is not None else now
        return replace(
            link,
            id=seen.id,
            state=state,
            limit=seen.limit,
            started=seen.started,
            ends_at=seen.ends_at,
            ended=min(ended, now) if state.over else None,
            ready=link.ready if link.ready is not None else seen.ready,
            expected=seen.expected if state is LinkState.PENDING else None,
            reason=seen.reason,
        )

    def _pause(self, now: int) -> int:
        """How long until the next look at our own jobs."""
        tempo = self.spec.tempo
        live = self._live()
        if self.state.phase is Phase.ENDING:
            return tempo.handover_look
        running = [link for link in live if link.state is LinkState.RUNNING]
        at_gate = self.spec.handover is Handover.SAVE and any(r.entered is None for r in running)
        if len(running) > 1 or at_gate:
            return tempo.handover_look
        if not live and self.state.submitting is None:
            return max(self.state.retry_at - now, tempo.handover_look)
        if live and live[-1].state is LinkState.PENDING and now - live[-1].submitted < tempo.look:
            # Where there is room a job starts within seconds.
            return tempo.handover_look
        if len(live) == 1 and running and running[0].ends_at is not None:
            left = running[0].ends_at - now
            return min(max(left // (CALM * LOOKS_LEFT), tempo.look), CALM * tempo.look)
        return tempo.look

    # --- what is over -----------------------------------------------------------------------

    def _reckon(self, ended: list[Link], now: int) -> None:
        for link in ended:
            match link.state:
                case LinkState.DONE:
                    self._finish(Phase.COMPLETED, f"job {link.id} has completed the work")
                    return
                case LinkState.CANCELLED:
                    self._finish(
                        Phase.STOPPED,
                        f"job {link.id} was cancelled by somebody, so the chain ends here; "
                        "`rn chain run` begins it again",
                    )
                    return
                case LinkState.FAILED:
                    if self._fail(link, now):
                        return
                case LinkState.LOST:
                    self._say(f"job {link.id} was lost ({link.reason}); the next one is submitted")
                case LinkState.TO_GO_ON:
                    self._change(failures=0)
                case LinkState.PENDING | LinkState.RUNNING:
                    raise AssertionError("only what is over is reckoned")
                case _:
                    assert_never(link.state)

    def _fail(self, link: Link, now: int) -> bool:
        """Whether the chain is given up."""
        lived = 0 if link.started is None or link.ended is None else link.ended - link.started
        short = lived < self.spec.tempo.short_life
        failures = self.state.failures + 1 if short else 0
        self._change(failures=failures)
        text = f"job {link.id} failed after {show_duration(lived)} ({link.reason})"
        if failures >= MAX_FAILURES:
            self._finish(
                Phase.STOPPED,
                f"{text}, the third time in a row; look at its log, mend the command, and begin "
                "again with `rn chain run`",
            )
            return True
        if failures:
            self._change(retry_at=now + self.spec.tempo.retry * failures)
        self._say(f"{text}; the next one is submitted")
        return False

    def _finish(self, verdict: Phase, why: str) -> None:
        self._change(phase=Phase.ENDING, verdict=verdict, outlook=None)
        self._say(why)

    def _end(self) -> None:
        """It is over when no job of it is left; where others stopped it, what runs may go on."""
        verdict = self.state.verdict or Phase.CANCELLED
        spared = LinkState.RUNNING if verdict is Phase.STOPPED else None
        ids = tuple(link.id for link in self._live() if link.state is not spared)
        if ids:
            self._orders.append(EndJobs(ids=ids))
        elif self.state.submitting is None:
            self._change(phase=verdict, outlook=None)
            if verdict is Phase.CANCELLED:
                self._say("the chain is cancelled; none of its jobs is left")

    def _drop_hopeless(self, seen: dict[int, SeenLink], now: int) -> None:
        for link in self._live():
            looked = seen.get(link.number)
            if looked is None or not looked.hopeless or link.killed is not None:
                continue
            self._orders.append(EndJobs(ids=(link.id,)))
            self._replace(replace(link, killed=now, leaving=now))
            why = f"job {link.id} can never start ({link.reason})"
            if not any(other.state is LinkState.RUNNING for other in self._live()):
                self._finish(Phase.STOPPED, f"{why}; change what the chain asks for")
                return
            self._change(retry_at=now + self.spec.tempo.retry_most)
            self._say(f"{why}; it is tried again later")

    # --- handing over -----------------------------------------------------------------------

    def _hand_over(self, seen: dict[int, SeenLink], now: int) -> None:
        running = [link for link in self._live() if link.state is LinkState.RUNNING]
        if not running:
            return
        newest = running[-1]
        older = [link for link in self._live() if link.number < newest.number]
        arrived = newest.number in seen and seen[newest.number].arrived
        if self.spec.handover is not Handover.SAVE:
            if newest.ready is not None and self.spec.handover is Handover.DRAIN:
                self._ask_to_leave(older, newest, now)
            elif newest.ready is not None:
                self._retire(older, now)
            elif older and now - (newest.started or now) > self.spec.tempo.ready_patience:
                self._say(
                    f"job {newest.id} runs but is not ready after "
                    f"{show_duration(self.spec.tempo.ready_patience)}; its predecessor stays",
                    once=True,
                )
        elif arrived and older:
            self._ask_to_leave(older, newest, now)
        elif arrived:
            # One life: the gate opens only when the batch system says that the others are over.
            self._orders.append(OpenGate(number=newest.number))
            self._replace(replace(newest, entered=newest.entered or now))

    def _retire(self, older: list[Link], now: int, why: str = "handed over") -> None:
        """Whoever is not needed any more is ended, and again until it is gone."""
        patience = self.spec.tempo.save_patience
        due = [
            link
            for link in older
            if link.killed is None
            or (EndJobs, link.number) not in self._told
            or now - link.killed >= patience
        ]
        if not due:
            return
        self._orders.append(EndJobs(ids=tuple(link.id for link in due)))
        for link in due:
            self._told.add((EndJobs, link.number))
            self._replace(replace(link, leaving=link.leaving or now, killed=now))
        self._say(f"{why}; job {', '.join(link.id for link in due)} is ended")

    def _ask_to_leave(self, older: list[Link], newest: Link, now: int) -> None:
        """In peace first; whoever does not go within the patience is ended."""
        for link in older:
            if link.state is LinkState.PENDING:
                self._retire([link], now)
            elif link.leaving is None or (AskToSave, link.number) not in self._told:
                self._told.add((AskToSave, link.number))
                self._orders.append(AskToSave(number=link.number, id=link.id))
                self._replace(replace(link, leaving=link.leaving or now))
                self._say(f"job {newest.id} takes over; job {link.id} is asked to leave")
            elif now - link.leaving >= self.spec.tempo.save_patience:
                self._retire([link], now)

    # --- providing --------------------------------------------------------------------------

    def _provide(self, queue: Queue | None, now: int) -> None:
        state = self.state
        live = self._live()
        if state.phase is not Phase.ACTIVE or state.submitting is not None:
            return
        if not live:
            if now >= state.retry_at:
                self._submit(now)
            return
        pending = [link for link in live if link.state is LinkState.PENDING]
        if len(pending) > 1:
            # A submission without an answer was accepted after all: the older one has aged.
            self._retire(pending[1:], now, "one successor is enough")
            return
        current = live[-1]
        if current.state is LinkState.PENDING:
            self._watch_pending(current, now)
            return
        if state.next_asked and (now >= state.retry_at or not state.tries):
            self._say(f"the successor of job {current.id} is submitted, as was asked")
            self._submit(now)
            return
        if queue is None:
            return
        ends_at = current.ends_at if current.ends_at is not None else now + current.limit
        timing = self._choose(self._view(queue, current, ends_at, now))
        middle = timing.expected_gap - timing.expected_overlap
        # What is submitted now starts after its wait. What is not yet will be submitted so that it
        # starts about when it is needed, as far as waits can be foretold.
        zero = ends_at if timing.submit else ends_at - middle
        self._change(
            outlook=Outlook(
                at=max(zero + middle, now),
                low=max(zero + timing.gap_low, now),
                high=max(zero + timing.gap_high, now),
                why="; ".join(timing.reasons),
            )
        )
        tempo = self.spec.tempo
        left = max(ends_at - now, 0)
        often = max(tempo.queue_look, left // LOOKS_LEFT)
        wait = max(min(timing.look_again_at - now, often), tempo.queue_look)
        # The last look is at the very end: a policy that waits for it must not be late.
        self._queue_at = now + (min(wait, left) if left > tempo.look else min(wait, tempo.look))
        if timing.submit and now < state.retry_at:
            self._queue_at = state.retry_at
        elif timing.submit:
            self._say(f"the successor of job {current.id} is submitted: {timing.reasons[0]}")
            self._submit(now)

    def _watch_pending(self, link: Link, now: int) -> None:
        outlook = self.state.outlook
        if outlook is not None:
            at = link.expected if link.expected is not None else outlook.at
            self._change(
                outlook=replace(
                    outlook, at=max(at, now), low=max(outlook.low, now), high=max(outlook.high, now)
                )
            )
        elif link.expected is not None:
            at = max(link.expected, now)
            self._change(outlook=Outlook(at=at, low=now, high=at, why="the batch system's plan"))

    def _view(self, queue: Queue, current: Link, ends_at: int, now: int) -> ChainView:
        return ChainView(
            now=now,
            total_nodes=max(queue.total_nodes, self.spec.nodes),
            free_nodes=queue.free_nodes,
            waiting=queue.waiting,
            running=queue.running,
            ended=queue.ended,
            predecessor=RunningJob(
                user=self._user,
                nodes=self.spec.nodes,
                limit=current.limit,
                submitted=current.submitted,
                started=current.started if current.started is not None else now,
            ),
            ends_at=ends_at,
            nodes=self.spec.nodes,
            limit=self.spec.limit,
        )

    def _submit(self, now: int) -> None:
        number = self.state.count + 1
        # Once it runs, the question arises anew.
        self._queue_at = 0
        self._change(submitting=number, count=number, retry_at=now + self.spec.tempo.retry)
        self._orders.append(Submit(number=number))

    def _submitted(self, event: Submitted, now: int) -> None:
        if not any(link.number == event.number for link in self.state.links):
            link = Link(
                number=event.number,
                id=event.id,
                state=LinkState.PENDING,
                submitted=now,
                limit=self.spec.limit,
            )
            self._change(links=(*self.state.links, link))
        self._change(submitting=None, tries=0, next_asked=False)
        self._say(f"job {event.id} is submitted")
        self._look_at = now + self.spec.tempo.handover_look

    def _refused(self, event: SubmitRefused, now: int) -> None:
        tempo = self.spec.tempo
        tries = self.state.tries + 1
        pause = min(tempo.retry << min(tries - 1, MAX_DOUBLINGS), tempo.retry_most)
        self._change(tries=tries, retry_at=now + pause)
        self._look_at = now + pause
        if event.doubtful:
            # Nobody knows whether it was accepted; the next look tells.
            self._say(f"no answer to a submission ({event.why}); looking whether it was accepted")
            return
        first = not self.state.links
        # A number that came to nothing is used again.
        self._change(submitting=None, count=event.number - 1)
        if first and not event.full:
            self._finish(Phase.STOPPED, f"the batch system refuses: {event.why}")
            self._end()
            return
        wait = show_duration(pause)
        what = "there is no room" if event.full else "the batch system refuses"
        self._say(f"{what}: {event.why}; tried again in {wait}", once=True)

    # --- shared -----------------------------------------------------------------------------

    def _live(self) -> list[Link]:
        return [link for link in self.state.links if not link.state.over]

    def _replace(self, link: Link) -> None:
        self._change(
            links=tuple(link if old.number == link.number else old for old in self.state.links)
        )

    def _change(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]

    def _say(self, text: str, *, once: bool = False) -> None:
        if once and _gist(self.state.words) == _gist(text):
            self._change(words=text)
            return
        self._change(words=text)
        self._orders.append(Say(text=text))

    def _fold(self) -> None:
        """Forget the oldest job that is over, once the one after it is over too."""
        links = self.state.links
        while len(links) > KEPT_LINKS and links[0].state.over and links[1].state.over:
            first = tally(links[:2], at_gate=self.spec.handover is Handover.SAVE)
            links = links[1:]
            self._change(
                links=links,
                gap=self.state.gap + first.gap,
                overlap=self.state.overlap + first.overlap,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    gap: int
    """Time in which nobody served, since the first one did."""
    overlap: int
    """Time in which two held nodes."""
    up: bool


def tally_of(state: ChainState, handover: Handover, now: int) -> Tally:
    """Gap and overlap so far; a gap that is still open counts up to now."""
    at_gate = handover is Handover.SAVE
    kept = tally(state.links, at_gate=at_gate, now=now, open_=not state.phase.over)
    return replace(kept, gap=kept.gap + state.gap, overlap=kept.overlap + state.overlap)


def tally(
    links: tuple[Link, ...], *, at_gate: bool, now: int | None = None, open_: bool = False
) -> Tally:
    began = [link for link in links if link.started is not None]
    gap = overlap = 0
    served_until: int | None = None
    serving = False
    for link in began:
        assert link.started is not None, "only what began is tallied"
        up = link.entered if at_gate else max(link.ready or 0, link.started)
        if up is None:
            continue
        if served_until is not None and not serving and up - served_until > RESOLUTION:
            gap += up - served_until
        serving |= not link.state.over
        served_until = max(served_until or 0, link.ended or up)
    for one, other in pairwise(began):
        until = min(one.ended or now or 0, other.ended or now or 0)
        overlap += max(until - (other.started or 0), 0)
    if open_ and now is not None and served_until is not None and not serving:
        gap += max(now - served_until, 0)
    return Tally(gap=gap, overlap=overlap, up=serving)


def _vanished(link: Link, now: int) -> Link:
    """The batch system forgets what ended long ago."""
    in_time = link.ends_at is not None and link.ends_at <= now
    if in_time or link.leaving is not None:
        ended = min(link.ends_at, now) if link.ends_at is not None else now
        return replace(link, state=LinkState.TO_GO_ON, ended=ended)
    reason = "the batch system does not know it any more"
    return replace(link, state=LinkState.LOST, ended=now, reason=reason)


def _gist(text: str) -> str:
    """A sentence without its numbers: what is said again and again differs only in them."""
    return "".join(letter for letter in text if not letter.isdigit())
