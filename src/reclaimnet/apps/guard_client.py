"""What the agent and the owner's command line speak to the guard with."""

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from reclaimnet.errors import Forbidden, Unavailable

DEFAULT_SOCKET: Final = Path("/run/reclaimnet/guard.sock")
ANSWER_SECONDS: Final = 5.0
_READ_BYTES: Final = 64 << 10


class GuardClient:
    """A connection to the guard."""

    def __init__(self, path: Path = DEFAULT_SOCKET) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(ANSWER_SECONDS)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise Unavailable(f"No guard answers at {path}: is it running?") from error
        self._buffer = b""

    def ask(
        self, verb: str, *, sockets: Sequence[socket.socket] = (), **request: Any
    ) -> dict[str, Any]:
        """The guard's answer; Forbidden with its own sentence if it refuses."""
        line = json.dumps({"verb": verb, **request}).encode() + b"\n"
        try:
            if sockets:
                socket.send_fds(self._socket, [line], [one.fileno() for one in sockets])
            else:
                self._socket.sendall(line)
            while b"\n" not in self._buffer:
                data = self._socket.recv(_READ_BYTES)
                if not data:
                    raise Unavailable("The guard has closed the connection.")
                self._buffer += data
        except OSError as error:
            raise Unavailable(f"The guard does not answer: {error}.") from error
        answer, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(answer)
        if not found.pop("ok"):
            raise Forbidden(found["error"])
        return found

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> "GuardClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
