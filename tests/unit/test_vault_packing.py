"""Chunks go as deltas where that is faster, whoever else is slow: link, codec or disk."""

from dataclasses import dataclass, field

from reclaimnet.adapters.vault.packing import Packing

CHUNK = 1 << 20
IN_SOCKETS = 4
"""Chunks that the two sockets take before anybody has to wait."""
IN_BUFFERS = 11
"""Chunks that have come and wait to be stored."""


@dataclass
class Way:
    """From one vault to another, in seconds for each byte."""

    link: float
    codec: float = 2e-9
    share: float = 0.75
    store: float = 0.3e-9
    unpack: float = 2e-9
    """What it takes to store a chunk that came whole, and one that came as a delta."""
    packing: Packing = field(default_factory=Packing)
    now: float = 0.0
    arrived: list[float] = field(default_factory=list)
    stored: list[float] = field(default_factory=list)
    packed: int = 0
    """Deltas that were made, whether sent or not."""

    def carry(self, chunks: int, *, stall_every: int | None = None) -> int:
        """How many of them went as deltas."""
        deltas = 0
        for number in range(chunks):
            begun, packs, wire = self.now, self.packing.packs(), 1.0
            if packs:
                self.packed += 1
                self.now += self.codec * CHUNK
                if self.packing.packed(cost=self.codec, share=self.share):
                    deltas, wire = deltas + 1, self.share
            last = self.arrived[-1] if self.arrived else 0.0
            self.arrived.append(max(last, self.now) + wire * self.link * CHUNK)
            done = self.stored[-1] if self.stored else 0.0
            takes = self.unpack if wire < 1 else self.store
            if stall_every is not None and number % stall_every == 3:
                takes += 50e-3 / CHUNK
            self.stored.append(max(done, self.arrived[-1]) + takes * CHUNK)
            if len(self.arrived) > IN_SOCKETS:
                self.now = max(self.now, self.arrived[-1 - IN_SOCKETS])
            if len(self.stored) > IN_BUFFERS:
                self.now = max(self.now, self.stored[-1 - IN_BUFFERS])
            self.packing.sent(packs=packs, cost=(self.now - begun) / CHUNK)
        return deltas


GIGABIT = 1 / 117e6
LOOPBACK = 1 / 1.5e9


def test_over_a_slow_link_nearly_all_chunks_go_as_deltas() -> None:
    assert Way(GIGABIT).carry(1000) > 850


def test_also_of_a_state_that_changed_little() -> None:
    assert Way(GIGABIT).carry(100) > 70


def test_over_a_fast_link_only_a_few_are_tried() -> None:
    assert Way(LOOPBACK).carry(1000) < 20


def test_a_disk_that_now_and_then_takes_its_time_is_no_slow_link() -> None:
    assert Way(LOOPBACK).carry(1000, stall_every=40) < 20


def test_what_the_other_end_takes_to_unpack_counts() -> None:
    """This end's codec would keep up with the link."""
    assert Way(1 / 300e6, codec=1e-9).carry(1000) > 850
    assert Way(1 / 300e6, codec=1e-9, unpack=8e-9).carry(1000) < 250


def test_what_does_not_shrink_is_not_packed_again_and_again() -> None:
    way = Way(GIGABIT, share=0.99)
    way.carry(1000)
    assert way.packed < 20


def test_a_link_that_becomes_slow_or_fast_is_noticed() -> None:
    way = Way(LOOPBACK)
    way.carry(500)
    way.link = GIGABIT
    way.carry(200)
    assert way.carry(300) > 200
    way.link = LOOPBACK
    way.carry(200)
    assert way.carry(300) < 20
