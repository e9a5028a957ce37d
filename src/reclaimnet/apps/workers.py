"""Processes that share long computations, and end with whoever started them."""

import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context


@contextmanager
def workers(count: int, *, start: str | None = None) -> Iterator[ProcessPoolExecutor]:
    """Who is interrupted does not wait for what was given out: a pool of its own would, for as long
    as that takes. `start` is how they come to be, if it matters."""
    pool = ProcessPoolExecutor(count, mp_context=get_context(start), initializer=_be_quiet)
    try:
        yield pool
    except BaseException:
        for child in active_children():
            child.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _be_quiet() -> None:
    """Ctrl-C reaches all processes of a terminal; it is for the one that talks to people."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
