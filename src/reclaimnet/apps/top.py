"""What `rn top` shows: each node's memory and pressure, and who stands still, why and until when.

Plain functions of the cards that nodes send with their beats.
"""

from collections.abc import Iterable
from typing import Any, Final

from reclaimnet.model.market import Card, Suspension, Vram
from reclaimnet.model.units import SECOND, show_duration, show_size

_HEADING: Final = ("NODE", "MEMORY", "USE", "STALL", "JOBS", "HELD", "NEWCOMERS")
_GAP: Final = "  "


def lines(cards: Iterable[Card]) -> list[str]:
    """A heading, a line for each node, and one more below it for each job that it holds."""
    known = sorted(cards, key=lambda card: card.node)
    rows = [_HEADING, *(_row(card) for card in known)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADING))]

    def line(row: tuple[str, ...]) -> str:
        return _GAP.join(
            word.ljust(width) for word, width in zip(row, widths, strict=True)
        ).rstrip()

    shown = [line(_HEADING)]
    for card in known:
        shown.append(line(_row(card)))
        shown += [f"  {_vram(card, vram)}" for vram in (card.memory.vram if card.memory else ())]
        shown += [f"  {_held(held, card.beat)}" for held in _holds(card)]
    return shown


def data(cards: Iterable[Card]) -> list[dict[str, Any]]:
    """The same for machines; seconds are counted from the card's own beat."""
    return [
        {
            "node": card.node,
            "limit_bytes": card.memory.limit if card.memory else None,
            "used_bytes": card.memory.used if card.memory else None,
            "stall": card.memory.stall if card.memory else None,
            "short_of_memory": card.short_of_memory,
            "vram": [
                {"gpu": vram.gpu, "total_bytes": vram.total, "used_bytes": vram.used}
                for vram in (card.memory.vram if card.memory else ())
            ],
            "jobs": [progress.job for progress in card.jobs],
            "held": [
                {
                    "job": held.job,
                    "rung": held.rung,
                    "bytes": held.bytes,
                    "for_s": (card.beat - held.since) / SECOND,
                    "left_s": (held.until - card.beat) / SECOND,
                    "why": held.why,
                }
                for held in _holds(card)
            ],
        }
        for card in sorted(cards, key=lambda card: card.node)
    ]


def _holds(card: Card) -> tuple[Suspension, ...]:
    return card.memory.held if card.memory else ()


def _row(card: Card) -> tuple[str, ...]:
    memory = card.memory
    if memory is None:
        return (card.node, "-", "-", "-", str(len(card.jobs)), "-", "-")
    share = 100 * memory.used / memory.limit if memory.limit else 0.0
    return (
        card.node,
        f"{show_size(memory.used)} of {show_size(memory.limit)}",
        f"{share:.1f} %",
        f"{100 * memory.stall:.1f} %",
        str(len(card.jobs)),
        str(len(memory.held)),
        "high priority only" if card.short_of_memory else "welcome",
    )


def _vram(card: Card, vram: Vram) -> str:
    index = next((f"GPU {gpu.index}" for gpu in card.gpus if gpu.id == vram.gpu), vram.gpu)
    share = 100 * vram.used / vram.total if vram.total else 0.0
    return f"{index}: {show_size(vram.used)} of {show_size(vram.total)}, {share:.1f} %"


def _held(held: Suspension, beat: int) -> str:
    waited = show_duration(max(beat - held.since, 0))
    left = show_duration(max(held.until - beat, 0))
    return (
        f"{held.job} is {held.rung} for {waited}, {left} at most to the next step: "
        f"{show_size(held.bytes)}, {held.why}"
    )
