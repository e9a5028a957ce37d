"""What can be seen of a rotation plan: how full each link is, who talks when, what was avoided."""

from collections.abc import Iterable
from dataclasses import replace

from reclaimnet.model.market import JobId, LinkSeen, Voice
from reclaimnet.model.moving import Link, LinkId
from reclaimnet.model.rhythm import Burst, Rhythm, Rotation, RotationPlan, Round
from reclaimnet.policy.gaps import beside_rhythms


def view(plan: RotationPlan, links: Iterable[Link]) -> tuple[LinkSeen, ...]:
    """All links, those without any rhythm too, by name."""
    return tuple(_view(plan, link) for link in sorted(links, key=lambda link: link.id))


def _view(plan: RotationPlan, link: Link) -> LinkSeen:
    round_ = next((r for r in plan.rounds if any(f.link == link.id for f in r.fits)), None)
    if round_ is None:
        return LinkSeen(link=link.id, rate=link.rate, assumed=link.assumed, left=link.room)
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
            demand=max((burst.demand for burst in r.bursts), default=0),
            talk=sum(burst.length for burst in r.bursts),
        )
        for r in sorted(here, key=lambda r: (-r.priority, r.job))
    )
    others = [1.0 - r.duty for r in here]
    quiet = 1.0
    for share in others:
        quiet *= share
    alone = [quiet / share if share else 0.0 for share in others]
    met_before = 1.0 - sum(alone) / len(alone)
    return LinkSeen(
        link=link.id,
        rate=link.rate,
        assumed=link.assumed,
        round=round_.length if round_.rotations else 0,
        use=fit.use,
        score=fit.score,
        slack=round_.slack,
        voices=voices,
        left=beside_rhythms(link, round_).room,
        met_before=met_before,
        meets_now=max(0.0, 1.0 - fit.score) if round_.rotations else met_before,
        reasons=round_.decision.reasons,
    )


def _talks(round_: Round, held: Rotation) -> tuple[tuple[int, int], ...]:
    rhythm = next(r for r in round_.rhythms if r.job == held.job)
    return tuple(
        ((held.shift + k * held.period + burst.start) % round_.length, burst.length)
        for k in range(round(round_.length / held.period))
        for burst in rhythm.bursts
    )


def rhythms_on(links: Iterable[LinkSeen]) -> list[Rhythm]:
    """Who talks there, as far as can be told from what a conductor shows: of those that run free,
    how much, but not when."""
    found: dict[JobId, Rhythm] = {}
    for link in links:
        for voice in link.voices:
            if voice.job in found:
                known = found[voice.job]
                found[voice.job] = replace(known, links=(*known.links, LinkId(link.link)))
            elif (rhythm := _rhythm(voice, link)) is not None:
                found[voice.job] = rhythm
    return list(found.values())


def _rhythm(voice: Voice, link: LinkSeen) -> Rhythm | None:
    # What it is held to is longer than its own by the padding.
    period = round(voice.period / (1.0 + voice.padding))
    bursts: tuple[Burst, ...] = ()
    if voice.shift is not None and voice.period > 0 and link.round:
        once = len(voice.talks) // max(1, round(link.round / voice.period))
        bursts = tuple(
            Burst(start=(start - voice.shift) % link.round, length=length, demand=voice.demand)
            for start, length in voice.talks[:once]
        )
        period = max((period, *(burst.end for burst in bursts)))
    elif 0 < voice.talk <= period:
        bursts = (Burst(start=period - voice.talk, length=voice.talk, demand=voice.demand),)
    if not bursts:
        return None
    try:
        return Rhythm(
            job=voice.job,
            period=period,
            bursts=bursts,
            links=(LinkId(link.link),),
            priority=voice.priority,
        )
    except ValueError:
        return None
