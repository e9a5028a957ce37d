"""Cards read in batches from a real server: none is missed, none is taken for newer than it is."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.live.embedded import TOKEN, embedded, joined, until

from reclaimnet.adapters.nats import campus as nats_campus
from reclaimnet.adapters.nats import follow, streams
from reclaimnet.adapters.nats.campus import Campus, Heard
from reclaimnet.adapters.nats.server import start_server, stop_server
from reclaimnet.engine.neighbourhood import LIVELY, Neighbourhood
from reclaimnet.model.market import Card, NodeId
from reclaimnet.model.units import MILLISECOND, SECOND

LAB, OFFICE, NEW = NodeId("lab3.cs"), NodeId("office"), NodeId("new")


@pytest.fixture
async def campus(tmp_path: Path) -> AsyncIterator[Campus]:
    with embedded(tmp_path / "state") as server:
        async with joined(server) as linked:
            yield linked


@contextlib.asynccontextmanager
async def hearing(
    campus: Campus, is_urgent: Callable[[], bool] = lambda: True
) -> AsyncIterator[list[Heard]]:
    """All that is heard, from when the reader is current."""
    heard: list[Heard] = []
    current = asyncio.Event()

    async def hear() -> None:
        cards = campus.watch_cards(current.set, is_urgent=is_urgent)
        async with contextlib.aclosing(cards):
            async for each in cards:
                heard.append(each)  # noqa: PERF401 - it never ends

    task = asyncio.create_task(hear())
    try:
        await until(current.is_set, "the reader is current")
        yield heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def beats(heard: list[Heard], node: NodeId) -> list[int]:
    return [each.card.beat for each in heard if each.card.node == node]


async def test_more_cards_than_a_batch_holds_are_all_heard_once(
    campus: Campus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "BATCH", 4)
    monkeypatch.setattr(follow, "_BATCH_REQUEST", b'{"batch":4,"no_wait":true}')
    for count in (3, 4, 5, 8):
        nodes = [NodeId(f"n{count}-{number}") for number in range(count)]
        async with hearing(campus) as heard:
            for node in nodes:
                await campus.beat(Card(node=node, beat=1))
            await until(lambda: len(heard) >= len(nodes), "all are heard")  # noqa: B023
            await campus.beat(Card(node=LAB, beat=count))
            await until(lambda: count in beats(heard, LAB), "and what comes later")  # noqa: B023
            assert all(beats(heard, node) == [1] for node in nodes)


async def test_of_many_beats_between_two_looks_the_newest_is_heard(campus: Campus) -> None:
    looks = asyncio.Event()
    async with hearing(campus, is_urgent=looks.is_set) as heard:
        for beat in range(1, 20):
            await campus.beat(Card(node=LAB, beat=beat))
        looks.set()
        await until(lambda: 19 in beats(heard, LAB), "the newest is heard")
        assert beats(heard, LAB) == sorted(set(beats(heard, LAB)))


async def test_a_card_that_was_there_before_is_known_to_be_old(campus: Campus) -> None:
    await campus.beat(Card(node=LAB, beat=1))
    await asyncio.sleep(0.2)
    async with hearing(campus) as heard:
        assert heard[0].age >= 200 * MILLISECOND
        await campus.beat(Card(node=LAB, beat=2))
        await until(lambda: beats(heard, LAB) == [1, 2], "the next one is heard")
        assert heard[1].age == 0


async def test_cards_are_heard_over_a_restart_and_who_died_meanwhile_is_known(
    tmp_path: Path,
) -> None:
    with embedded(tmp_path) as server:
        async with joined(server) as campus, hearing(campus) as heard:
            await campus.beat(Card(node=LAB, beat=1))
            await until(lambda: beats(heard, LAB) == [1], "it is heard")
            os.kill(server.pid, signal.SIGKILL)
            await until(lambda: not campus.is_up, "the link is lost")
            stop_server(server)
            again = start_server(tmp_path, TOKEN, port=server.port)
            try:
                async with joined(again, "other") as other:
                    # The reader may or may not be back by now; nothing of this is lost either way.
                    await other.beat(Card(node=OFFICE, beat=1))
                    await asyncio.sleep(0.2)
                    await other.beat(Card(node=NEW, beat=1))
                await until(lambda: bool(beats(heard, NEW)), "a newcomer is heard")
                await until(lambda: bool(beats(heard, OFFICE)), "and who came before it")
                assert beats(heard, OFFICE) == [1]
                together = [each for each in heard if each.card.node in (OFFICE, NEW)]
                if together[0].age:
                    # Both came with one look: the first by so much earlier as the server says.
                    assert together[0].age >= 200 * MILLISECOND
                assert together[1].age == 0
            finally:
                await campus.close()
                stop_server(again)


async def test_a_reader_that_the_server_has_forgotten_begins_where_it_was(campus: Campus) -> None:
    """As it does with one that was stopped for a minute."""
    jetstream = campus._link.jetstream
    async with hearing(campus) as heard:
        await campus.beat(Card(node=LAB, beat=1))
        await until(lambda: beats(heard, LAB) == [1], "it is heard")
        for reader in await jetstream.consumers_info(streams.NODES):
            await jetstream.delete_consumer(streams.NODES, reader.name)
        await campus.beat(Card(node=OFFICE, beat=1))
        await until(lambda: beats(heard, OFFICE) == [1], "a new reader is there")
        assert beats(heard, LAB) == [1]


async def test_cards_of_a_new_store_are_heard_from_its_start(tmp_path: Path) -> None:
    with embedded(tmp_path / "one") as server:
        async with joined(server) as campus, hearing(campus) as heard:
            for beat in range(1, 6):
                await campus.beat(Card(node=LAB, beat=beat))
            await until(lambda: 5 in beats(heard, LAB), "it is heard")
            stop_server(server)
            empty = start_server(tmp_path / "two", TOKEN, port=server.port)
            try:
                async with joined(empty) as other:
                    await other.beat(Card(node=NEW, beat=1))
                await until(lambda: bool(beats(heard, NEW)), "the new store is read")
            finally:
                await campus.close()
                stop_server(empty)


@pytest.mark.parametrize("pause_s", [nats_campus.URGENT_PAUSE_S, nats_campus.LONGEST_PAUSE_S])
def test_who_lives_is_not_given_up_and_who_is_silent_is_soon_after(pause_s: float) -> None:
    """By the engine's own rule, at the shortest and the longest pause, wherever beats fall."""
    pause = round(pause_s * SECOND)
    assert pause + LIVELY.beat < LIVELY.lease
    for shift in range(0, pause, pause // 10):
        around = Neighbourhood(OFFICE, LIVELY)
        dies = 60 * SECOND
        for now in range(shift, 2 * dies, pause):
            newest = min(now, dies) // LIVELY.beat
            around.heard(Card(node=LAB, beat=newest), now)
            silence = now - newest * LIVELY.beat
            if silence < LIVELY.given_up_after:
                assert around.alive(LAB, now + pause - 1)
            elif silence >= LIVELY.given_up_after + pause:
                assert not around.alive(LAB, now)
