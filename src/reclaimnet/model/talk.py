"""Talk: how a job's iterations use the network, wherever it runs."""

from dataclasses import dataclass
from typing import Final

from reclaimnet.model.units import parse_duration, parse_rate

ALIKE_PERIOD: Final = 0.05
ALIKE_LENGTH: Final = 0.15
"""Two measurements of one job that differ by no more than this part are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """One stretch of an iteration in which the job talks."""

    start: int
    """Nanoseconds after the iteration began."""
    length: int
    """How long it takes with the link to itself."""
    demand: int
    """Bytes a second it would use then."""

    @property
    def end(self) -> int:
        return self.start + self.length


def check_bursts(period: int, bursts: tuple[Burst, ...]) -> None:
    """What comes from others, too, is refused if it is none. Raises ValueError."""
    ends = (0, *(burst.end for burst in bursts))
    starts = (*(burst.start for burst in bursts), period)
    if period <= 0:
        raise ValueError("a rhythm has a period")
    if any(burst.length <= 0 for burst in bursts):
        raise ValueError("a burst takes time")
    if any(end > start for end, start in zip(ends, starts, strict=True)):
        raise ValueError("bursts follow each other inside of their iteration")


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """An iteration of a job: it computes, and talks in bursts."""

    period: int
    bursts: tuple[Burst, ...]

    def __post_init__(self) -> None:
        check_bursts(self.period, self.bursts)

    def alike(self, other: "Talk") -> bool:
        """Whether the difference is worth no word."""
        mine, theirs = (sum(burst.length for burst in talk.bursts) for talk in (self, other))
        return (
            len(self.bursts) == len(other.bursts)
            and abs(self.period - other.period) <= ALIKE_PERIOD * self.period
            and abs(mine - theirs) <= ALIKE_LENGTH * mine
        )


def parse_talk(text: str) -> Talk:
    """A rhythm as people declare it: 336ms/131ms@200M is an iteration of 336 ms, at the end of
    which it talks for 131 ms at 200 Mbit/s. Raises ValueError with a sentence that says so."""
    whole, _, rate = text.partition("@")
    iteration, _, talks = whole.partition("/")
    try:
        period, length, demand = parse_duration(iteration), parse_duration(talks), parse_rate(rate)
        if not 0 < length < period or not demand:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{text!r} is not a rhythm; write the iteration, how long of it the job talks, and how "
            "fast, as in 336ms/131ms@200M"
        ) from None
    return Talk(period=period, bursts=(Burst(start=period - length, length=length, demand=demand),))
