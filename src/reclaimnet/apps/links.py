"""What `rn links` shows: how full each link is, who talks when, what moves, and who conducts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from reclaimnet.model.market import Card, LinkSeen, Sending, Voice
from reclaimnet.model.units import show_count, show_duration, show_size

WIDTH: Final = 60
"""Characters of the circle, laid out as a line."""
WORTH_A_LINE: Final = 12_500
"""Bytes a second, 0.1 Mbit/s: less than this goes through any machine."""
_QUIET, _TALKS, _MEETS = "·", "█", "▒"
_FREE: Final = "~"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What leaves a machine, in bytes a second, by whose it is."""

    node: str
    sent: int
    """In all, as its network interface counts."""
    migration: int
    training: int

    @property
    def background(self) -> int:
        """Everybody else's."""
        return max(0, self.sent - self.migration - self.training)


def loads(cards: Sequence[Card]) -> list[Load]:
    """Of the machines that tell, by node."""
    seen = {link.link: link for card in cards for link in card.links}
    found = []
    for card in cards:
        if card.traffic is None:
            continue
        link = seen.get(f"{card.node} up")
        found.append(
            Load(
                node=card.node,
                sent=card.traffic.sent,
                migration=link.reached if link else sum(sent.rate for sent in card.sending),
                training=round(link.use * (link.carries or link.rate)) if link else 0,
            )
        )
    return found


def data(cards: Iterable[Card]) -> dict[str, Any]:
    """For `--json`: links with who conducts them, and all that is on its way."""
    ranked = sorted(cards, key=lambda card: card.node)
    return {
        "links": [
            {**msgspec.to_builtins(link), "conductor": card.node}
            for card in ranked
            for link in card.links
        ],
        "stretches": {stretch: card.node for card in ranked for stretch in card.conducts},
        "uplinks": [
            {**msgspec.to_builtins(load), "background": load.background} for load in loads(ranked)
        ],
        "sending": [
            {**msgspec.to_builtins(sending), "from": card.node}
            for card in ranked
            for sending in card.sending
        ],
    }


def lines(cards: Iterable[Card], *, now: int) -> list[str]:
    """For people: each link with what is on it, then each transfer."""
    ranked = sorted(cards, key=lambda card: card.node)
    found: list[str] = []
    for card in ranked:
        for link in card.links:
            head, *voices = picture(link)
            found += [f"{head}  by {card.node}", *voices]
    for card in ranked:
        found += [f"{card.node} → {sent.to}  {progress(sent, now=now)}" for sent in card.sending]
    found += [
        f"{load.node} out  {_mbit(load.sent)}: everybody else {_mbit(load.background)}, "
        f"training {_mbit(load.training)}, moving state {_mbit(load.migration)}"
        for load in loads(ranked)
        if load.sent >= WORTH_A_LINE
    ]
    if not found:
        count = len({stretch for card in ranked for stretch in card.conducts})
        found.append(f"nothing moves; {count} stretches are conducted")
    return found


def _mbit(rate: int) -> str:
    return f"{rate * 8 / 1e6:.3g} Mbit/s"


def progress(sent: Sending, *, now: int) -> str:
    """How far a transfer is, against its deadline."""
    done = 1.0 - sent.bytes_left / sent.size if sent.size else 1.0
    words = [f"{sent.job}  {done:.0%} of {show_size(sent.size)}"]
    if sent.rate:
        words.append(f"{show_size(sent.rate)}/s")
    if sent.pace is not None:
        words.append(f"held to {show_size(sent.pace)}/s")
    if sent.eta is not None and sent.bytes_left:
        words.append(f"there in {show_duration(max(0, sent.eta - now))}")
    if sent.deadline is not None:
        words.append(f"needed in {show_duration(max(0, sent.deadline - now))}")
    if sent.shed:
        words.append("given up for others")
    return "  ".join(words)


def picture(one: LinkSeen, *, width: int = WIDTH) -> list[str]:
    """Lines for a terminal: the link, then each job's part of the circle."""
    about = "about " if one.assumed else ""
    head = f"{one.link}  {about}{one.rate * 8 / 1e6:.0f} Mbit/s  use {one.use:.0%}"
    if one.carries is not None:
        head += f"  carries {one.carries * 8 / 1e6:.0f} Mbit/s"
    if one.sending:
        head += f"  {show_count(one.sending, 'transfer')} at {one.reached * 8 / 1e6:.0f} Mbit/s"
    if one.shed:
        head += f"  {one.shed} given up"
    if not one.round:
        jobs = show_count(len(one.voices), "job")
        who = f"  {jobs}, nobody conducted" if one.voices else "  no rhythm"
        return [head + who]
    text = [
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
        text.append(f"  {voice.job[:20]:20} {bar} {note} pad {voice.padding:.1%}")
    return text


def _talking(voice: Voice, length: int, width: int) -> Sequence[bool]:
    """Which characters of the line the job talks in, by the middle of each."""
    middles = [(i + 0.5) * length / width for i in range(width)]
    return [
        any((middle - start) % length < long for start, long in voice.talks) for middle in middles
    ]
