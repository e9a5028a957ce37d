"""The mixes of jobs with which `rn bench rhythm` judges ways of sharing a link."""

import random
from dataclasses import dataclass, replace
from typing import Any, Final

from reclaimnet.model.units import MILLISECOND, SECOND
from reclaimnet.sim.rhythm import (
    PROFILES,
    Piece,
    piece,
)

LINK_RATE: Final = 25_000_000
"""200 Mbit/s, in bytes a second as they are on the wire."""
MOST_JOBS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    name: str
    jobs: tuple[tuple[str, int, float], ...]
    """Profile, priority, and the share of the link that the job talks at."""
    links: int = 1
    spread: bool = False
    """Jobs are submitted over one iteration instead of all at once."""


def same(count: int, model: str, *, high: int = 1, share: float = 1.0) -> tuple[Any, ...]:
    return tuple((model, int(i < high), share) for i in range(count))


MIXES: Final = (
    Mix(name="3 vgg16x8", jobs=same(3, "vgg16x8")),
    Mix(name="2 bertx32", jobs=same(2, "bertx32", high=0)),
    Mix(name="2 gpt2x32", jobs=same(2, "gpt2x32")),
    Mix(name="vgg19x32 + vgg16x32", jobs=(("vgg19x32", 1, 1.0), ("vgg16x32", 0, 1.0))),
    Mix(
        name="gpt2x8 + 2 vgg19x4",
        jobs=(("gpt2x8", 1, 1.0), ("vgg19x4", 0, 1.0), ("vgg19x4", 0, 1.0)),
    ),
    Mix(name="2 vgg16x32", jobs=same(2, "vgg16x32")),
    Mix(name="3 vgg16x32", jobs=same(3, "vgg16x32", high=0), spread=True),
    Mix(name="vgg16x8 + bertx8", jobs=(("vgg16x8", 1, 1.0), ("bertx8", 0, 1.0))),
    Mix(name="4 vgg16x32 at half rate", jobs=same(4, "vgg16x32", share=0.5)),
    Mix(
        name="vgg19x8 + vgg16x8 + 2 gpt2x8",
        jobs=(("vgg19x8", 1, 1.0), ("vgg16x8", 0, 1.0), ("gpt2x8", 0, 1.0), ("gpt2x8", 0, 1.0)),
        spread=True,
    ),
    Mix(name="8 bertx4", jobs=same(8, "bertx4")),
    Mix(
        name="6 on two links",
        jobs=(
            ("vgg16x8", 1, 1.0),
            ("vgg16x32", 1, 1.0),
            ("vgg16x8", 0, 1.0),
            ("vgg16x8", 0, 1.0),
            ("vgg16x32", 0, 1.0),
            ("gpt2x4", 0, 1.0),
        ),
        links=2,
        spread=True,
    ),
)


def pieces_of(mix: Mix, seconds: float, rng: random.Random) -> list[Piece]:
    found = []
    for i, (model, priority, share) in enumerate(mix.jobs):
        period = PROFILES[model][0] * MILLISECOND
        made = piece(
            f"{model}-{i}",
            model,
            rate=LINK_RATE,
            iterations=max(6, round(seconds * SECOND / period)),
            priority=priority,
            share=share,
        )
        late = rng.randrange(period) if mix.spread else 0
        found.append(replace(made, submitted=late))
    return found


def random_mix(rng: random.Random, *, most: int) -> Mix:
    """Two to eight jobs on a link: one model many times, or several that come as they come."""
    count = min(max(1, most), rng.randint(2, MOST_JOBS))
    models = sorted(PROFILES)
    alike = rng.random() < 0.5
    first = rng.choice([m for m in models if PROFILES[m][1] * count <= 1.3 * PROFILES[m][0]])
    jobs = tuple((first if alike else rng.choice(models), int(i == 0), 1.0) for i in range(count))
    return Mix(name=f"{count} jobs", jobs=jobs, spread=rng.random() < 0.5)
