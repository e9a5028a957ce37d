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
        self._given: list[int] = []

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
                data, given, _, _ = socket.recv_fds(self._socket, _READ_BYTES, _MAX_GIVEN)
                self._given += given
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


def samples(status: dict[str, Any]) -> list[tuple[str, dict[str, str], float]]:
    """The guard's counters as metrics: name, labels, value."""
    counted = {"lane": status["counts"]["lane"]}
    counted |= {guest["guest"]: guest["counts"] for guest in status["guests"]}
    found: list[tuple[str, dict[str, str], float]] = [
        ("reclaimnet_guard_guests", {}, len(status["guests"])),
        ("reclaimnet_guard_halted", {}, float(status["halted"])),
    ]
    for guest, counts in sorted(counted.items()):
        for key, count in counts.items():
            direction, verdict = key.split("_")
            labels = {"guest": guest, "direction": direction, "verdict": verdict}
            found += [
                (f"reclaimnet_edge_{unit}_total", labels, float(count[unit]))
                for unit in ("packets", "bytes")
            ]
    return found
