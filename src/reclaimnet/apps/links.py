"""What `rn links` shows: how full each link is, who talks when, and what the conductor avoided."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from reclaimnet.model.market import JobId
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.rhythm import Gap, Rotation, RotationPlan, Round
from reclaimnet.policy.rotate import gaps

WIDTH: Final = 60
"""Characters of the circle, laid out as a line."""
_QUIET, _TALKS, _MEETS = "·", "█", "▒"
_FREE: Final = "~"


@dataclass(frozen=True, slots=True, kw_only=True)
class Voice:
    """One job on a link."""

    job: JobId
    priority: int
    period: int
    shift: int | None
    """None if it runs free."""
    padding: float
    talks: tuple[tuple[int, int], ...]
    """Start and length of its bursts within the round; empty if it runs free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    link: LinkId
    rate: int
    round: int
    """Nanoseconds; 0 if nobody is conducted."""
    use: float
    score: float
    slack: int
    voices: tuple[Voice, ...]
    gaps: tuple[Gap, ...]
    """What is left for migrations and checkpoints."""
    met_before: float
    """The share of each job's bursts that would meet others if nobody conducted, on average."""
    meets_now: float
    """The share that still does by plan."""
    reasons: tuple[str, ...]


def view(plan: RotationPlan, links: Iterable[Link]) -> tuple[LinkView, ...]:
    """All links, those without any rhythm too, by name."""
    return tuple(_view(plan, link) for link in sorted(links, key=lambda link: link.id))


def picture(one: LinkView, *, width: int = WIDTH) -> list[str]:
    """Lines for a terminal: the link, then each job's part of the circle."""
    head = f"{one.link}  {one.rate * 8 / 1e6:.0f} Mbit/s  use {one.use:.0%}"
    if not one.round:
        who = f"  {len(one.voices)} jobs, nobody conducted" if one.voices else "  no rhythm"
        return [head + who]
    lines = [
        f"{head}  round {one.round / 1e6:.0f} ms  score {one.score:.2f}  "
        f"slack {one.slack / 1e6:.1f} ms  meetings {one.met_before:.0%} → {one.meets_now:.0%}"
    ]
    rows = [_talking(voice, one.round, width) for voice in one.voices]
    for voice, row in zip(one.voices, rows, strict=True):
        if voice.shift is None:
            bar = _FREE * width
        else:
            bar = "".join(
                (_MEETS if sum(other[i] for other in rows) > 1 else _TALKS) if row[i] else _QUIET
                for i in range(width)
            )
        note = "free" if voice.shift is None else f"+{voice.shift / 1e6:.0f} ms"
        lines.append(f"  {voice.job[:20]:20} {bar} {note} pad {voice.padding:.1%}")
    return lines


def _view(plan: RotationPlan, link: Link) -> LinkView:
    round_ = next((r for r in plan.rounds if any(f.link == link.id for f in r.fits)), None)
    if round_ is None:
        return LinkView(
            link=link.id,
            rate=link.rate,
            round=0,
            use=0.0,
            score=1.0,
            slack=0,
            voices=(),
            gaps=(Gap(start=0, length=1, rate=link.room),),
            met_before=0.0,
            meets_now=0.0,
            reasons=(),
        )
    fit = next(f for f in round_.fits if f.link == link.id)
    here = [r for r in round_.rhythms if link.id in r.links]
    voices = tuple(
        Voice(
            job=r.job,
            priority=r.priority,
            period=r.period if (held := round_.rotation(r.job)) is None else held.period,
            shift=None if held is None else held.shift,
            padding=0.0 if held is None else held.padding,
            talks=() if held is None else _talks(round_, held),
        )
        for r in sorted(here, key=lambda r: (-r.priority, r.job))
    )
    others = [1.0 - r.duty for r in here]
    quiet = 1.0
    for share in others:
        quiet *= share
    alone = [quiet / share if share else 0.0 for share in others]
    return LinkView(
        link=link.id,
        rate=link.rate,
        round=round_.length if round_.rotations else 0,
        use=fit.use,
        score=fit.score,
        slack=round_.slack,
        voices=voices,
        gaps=gaps(round_, link),
        met_before=1.0 - sum(alone) / len(alone),
        meets_now=max(0.0, 1.0 - fit.score) if round_.rotations else 1.0 - sum(alone) / len(alone),
        reasons=round_.decision.reasons,
    )


def _talks(round_: Round, held: Rotation) -> tuple[tuple[int, int], ...]:
    rhythm = next(r for r in round_.rhythms if r.job == held.job)
    return tuple(
        ((held.shift + k * held.period + burst.start) % round_.length, burst.length)
        for k in range(round(round_.length / held.period))
        for burst in rhythm.bursts
    )


def _talking(voice: Voice, length: int, width: int) -> Sequence[bool]:
    """Which characters of the line the job talks in, by the middle of each."""
    middles = [(i + 0.5) * length / width for i in range(width)]
    return [
        any((middle - start) % length < long for start, long in voice.talks) for middle in middles
    ]
