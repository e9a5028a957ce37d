"""Who is interrupted leaves no process behind, and does not wait for any."""

import time
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import active_children

from reclaimnet.apps.workers import workers

AGES = 3600.0


def interrupted() -> list[Future[None]]:
    given_out: list[Future[None]] = []
    with suppress(KeyboardInterrupt), workers(2) as pool:
        given_out += [pool.submit(time.sleep, AGES) for _ in range(4)]
        raise KeyboardInterrupt
    return given_out


def test_who_is_interrupted_does_not_wait_for_what_was_given_out() -> None:
    given_out = interrupted()
    assert all(one.cancelled() or one.exception() is not None for one in given_out)
    assert not active_children()


def test_what_was_given_out_comes_back() -> None:
    with workers(2) as pool:
        assert list(pool.map(abs, range(-5, 0))) == [5, 4, 3, 2, 1]
    assert not active_children()
