"""An agent ends when it is told to, whatever it waits for at that moment."""

import asyncio
import contextlib

import pytest

from reclaimnet.apps.agent import end_task


@pytest.mark.parametrize("swallowed", [0, 1, 3])
def test_a_task_ends_though_what_it_waits_for_swallows_cancellations(swallowed: int) -> None:
    closed = []

    async def live() -> None:
        try:
            for _ in range(swallowed):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    async def run() -> bool:
        task = asyncio.create_task(live())
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await end_task(task, ask_again_s=0.01)
        return task.cancelled()

    assert asyncio.run(run())
    assert closed == [True]
