"""Origin: one of the sources of a pull, how it is reached, and what has been seen of it."""

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from reclaimnet.adapters.vault.stream import POLL_S, Distrust
from reclaimnet.errors import Forbidden, NotFound, ReclaimNetError, Unavailable, VaultFull
from reclaimnet.model.market import Address

CONNECT_S: Final = 5.0
TRIES: Final = 4
"""How often in a row a source may break off before it is given up."""
RETRY_S: Final = 0.1
"""The first pause before another try; each further one is twice as long."""
MAX_ABSENT: Final = 64
"""A source that lacks more chunks than this of what it says it has is given up."""


class Broken(Exception):
    """A connection is over; another may do better."""


@dataclass(slots=True, eq=False)
class Origin:
    """Any thread of the pull may note what it has seen."""

    address: Address
    absent: set[int] = field(default_factory=set)
    given_up: ReclaimNetError | None = None
    _failures: int = 0
    """In a row, without a chunk in between."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def connect(self, stopped: Callable[[], bool]) -> socket.socket:
        """Like socket.create_connection, but a stop ends it."""
        family, kind, protocol, _, target = socket.getaddrinfo(
            self.address.host, self.address.port, type=socket.SOCK_STREAM
        )[0]
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            code = connection.connect_ex(target)
            poller = select.poll()
            poller.register(connection, select.POLLOUT)
            deadline = time.monotonic() + CONNECT_S
            while code == errno.EINPROGRESS:
                if poller.poll(POLL_S * 1000):
                    code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                elif stopped() or time.monotonic() > deadline:
                    code = errno.ETIMEDOUT
            if code:
                raise OSError(code, os.strerror(code))
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Note against the source what went wrong with it; only a full vault is our own fault."""
        try:
            yield
        except VaultFull:
            raise
        except ReclaimNetError as error:
            self.give_up(error)
            raise Broken from error
        except Distrust as error:
            refusal = Forbidden(
                f"{self._name} and this node do not trust each other's "
                f"certificates ({error}); have both certified by one campus"
            )
            self.give_up(refusal)
            raise Broken from error
        except OSError as error:
            self._broke_off(error)
            raise Broken from error

    def give_up(self, error: ReclaimNetError) -> None:
        self.given_up = type(error)(f"{self._name}: {error}")

    def lacks(self, place: int) -> None:
        self.absent.add(place)
        if len(self.absent) > MAX_ABSENT:
            self.give_up(NotFound("it lacks much of the checkpoint"))

    def did_well(self) -> None:
        with self._lock:
            self._failures = 0

    def pause_s(self) -> float:
        """How long to leave it alone after it broke off."""
        return RETRY_S * 2.0**self._failures

    def _broke_off(self, error: OSError) -> None:
        with self._lock:
            self._failures += 1
            if self._failures >= TRIES:
                self.given_up = Unavailable(f"{self._name} broke off: {error}")

    @property
    def _name(self) -> str:
        return f"{self.address.host}:{self.address.port}"
