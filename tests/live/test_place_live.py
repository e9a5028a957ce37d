"""Placement over a real server: real minds, a connection each."""

from collections.abc import Iterator
from multiprocessing import resource_tracker

import pytest

from reclaimnet.apps.bench import place_live


@pytest.fixture(autouse=True)
def _no_tracker_left() -> Iterator[None]:
    """multiprocessing starts a helper that would outlive the test."""
    yield
    resource_tracker._resource_tracker._stop()


async def test_every_job_is_placed_once_and_messages_do_not_grow_with_the_campus() -> None:
    """That none is lost or started twice is asserted while it is measured."""
    small = await place_live._measure(3, calm=5, flood=40)
    large = await place_live._measure(9, calm=5, flood=40)
    assert large["sent_per_placement"] <= 1.5 * small["sent_per_placement"] + 2
