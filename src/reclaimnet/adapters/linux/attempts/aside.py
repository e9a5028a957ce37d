"""What takes long, done beside the runner's thread."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from reclaimnet.adapters.linux import minder

THREADS: Final = 2
T = TypeVar("T")


class Aside:
    """`do` has the runner's thread do something."""

    def __init__(self, do: Callable[[Callable[[], None]], None], *, nice: int) -> None:
        self._do = do
        self._pool = ThreadPoolExecutor(
            THREADS, "reclaimnet-copier", initializer=minder.hurry, initargs=(nice,)
        )

    def run(self, work: Callable[[], T], then: Callable[[Future[T]], None] | None = None) -> None:
        """Do the work; what came of it is given to `then`, in the runner's thread."""
        doing = self._pool.submit(work)
        if then is not None:
            doing.add_done_callback(lambda done: self._do(lambda: then(done)))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
