"""What the agent and the owner's command line speak to the guard with."""

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from reclaimnet.errors import Forbidden, Unavailable

DEFAULT_SOCKET: Final = Path("/run/reclaimnet/guard.sock")
ANSWER_SECONDS: Final = 5.0
_MAX_GIVEN: Final = 1
_ANSWER_BYTES: Final = 1 << 20


class GuardClient:
    """A connection to the guard."""

    def __init__(self, path: Path = DEFAULT_SOCKET) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_SECONDS)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise Unavailable(f"No guard answers at {path}: is it running?") from error
        self._given: list[int] = []

    def ask(
        self, verb: str, *, sockets: Sequence[socket.socket] = (), **request: Any
    ) -> dict[str, Any]:
        """The guard's answer; Forbidden with its own sentence if it refuses."""
        packet = json.dumps({"verb": verb, **request}).encode()
        try:
            socket.send_fds(self._socket, [packet], [one.fileno() for one in sockets])
            answer, given, _, _ = socket.recv_fds(self._socket, _ANSWER_BYTES, _MAX_GIVEN)
        except OSError as error:
            raise Unavailable(f"The guard does not answer: {error}.") from error
        if not answer:
            raise Unavailable("The guard has closed the connection.")
        self._given += given
        found: dict[str, Any] = json.loads(answer)
        if not found.pop("ok"):
            raise Forbidden(found["error"])
        return found

    def listen(self, port: int = 0) -> socket.socket:
        """A listening socket in the guests' lane, where the kill switch and the shaper see it."""
        self.ask("listen", port=port)
        return socket.socket(fileno=self._given.pop())

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> "GuardClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
