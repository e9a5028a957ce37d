"""`rn up` and `rn down`: the campus's one service, NATS with a gateway beside it."""

import asyncio
import contextlib
import http.client
import json
import logging
import os
import queue
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

from OpenSSL import SSL

from reclaimnet.adapters.gpu import find
from reclaimnet.adapters.linux.attempts.reports import Exited
from reclaimnet.adapters.linux.runner import Runner
from reclaimnet.adapters.nats.access import CAMPUS_HOST, Key, new_key
from reclaimnet.adapters.nats.campus import Campus, Enrolment, EnrolmentAsked
from reclaimnet.adapters.nats.seals import Seal
from reclaimnet.adapters.nats.server import (
    Routes,
    Server,
    Tls,
    is_running,
    reload_access,
    running_server,
    start_server,
    stop_server,
)
from reclaimnet.adapters.nats.witness import Witness
from reclaimnet.adapters.tls import ca
from reclaimnet.adapters.vault.store import Vault
from reclaimnet.apps import daemon, gateway, gateway_page
from reclaimnet.apps.agent import LEAVE_AT_MOST
from reclaimnet.apps.agent_options import start_again
from reclaimnet.apps.cli_base import waiting
from reclaimnet.apps.client import Gateway, connection_to
from reclaimnet.apps.config import Config, remember_gateway
from reclaimnet.apps.gateway_output import Fetcher
from reclaimnet.apps.live.scratch import SCRATCH
from reclaimnet.apps.names import NAME
from reclaimnet.apps.notify import Notifier
from reclaimnet.apps.own_command import rn
from reclaimnet.apps.owners_word import FILE, has_lent
from reclaimnet.apps.register import STANDING, Invitation, Register
from reclaimnet.engine.neighbourhood import LIVELY
from reclaimnet.errors import BadConfig, Forbidden, ReclaimNetError, Unavailable, UsageError
from reclaimnet.model.market import JobId, NodeId
from reclaimnet.model.units import GIB, SECOND, show_count
from reclaimnet.model.work import JobRecord
from reclaimnet.wire import GATEWAY

READY_S: Final = 30.0
FETCH_QUOTA: Final = 64 * GIB
"""Output on its way from a node to its user passes through the gateway's disk."""
END_S: Final = 10.0
HEALTH_TIMEOUT_S: Final = 2.0
LOOK_AGAIN_S: Final = 0.5
"""How soon a NATS server that died is noticed, and started again."""
AGENT_END_S: Final = 15.0
SAVE_S: Final = LEAVE_AT_MOST / SECOND
"""How long `rn down` waits for the jobs here to be saved."""
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
_log = logging.getLogger("reclaimnet.up")


def up(
    *,
    config: Config,
    listen: str,
    gateway_port: int,
    foreground: bool,
    read_only: bool = False,
    servers: int | None = None,
    plain_http: bool = False,
) -> int:
    config.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    pid_file = config.state / "up.pid"
    running = daemon.running(pid_file)
    if running is not None:
        left = _left(config)
        raise UsageError(
            f"a campus runs here already (pid {running.pid}) at {left.get('gateway_url')}; "
            f"stop it first with `{config.rn} down`"
        )
    count = _server_count(config, servers)
    if foreground:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        serving = _serve(
            config,
            listen,
            gateway_port,
            read_only=read_only,
            servers=count,
            secure=not plain_http and listen not in LOOPBACK,
        )
        return asyncio.run(serving)
    argv = rn("--state", str(config.state), "up")
    argv += ["--foreground", "--listen", listen, "--gateway-port", str(gateway_port)]
    argv += ["--read-only"] if read_only else []
    argv += ["--servers", str(count)]
    argv += ["--plain-http"] if plain_http else []
    with waiting("starting the campus"):
        daemon.spawn(
            argv,
            log=config.state / "up.log",
            pid_file=pid_file,
            ready=lambda: _healthy(config),
            patience_s=READY_S * count,
            env=dict(os.environ),
        )
    left = _left(config)
    ours = config.rn
    again = [_start_again(config, name) for name in lent_before(config)]
    link = page_link(left["gateway_url"], _secret(config.state / "gateway-token"))
    sys.stderr.write(
        f"The campus is up at {left['gateway_url']}; `{ours} down` ends it.\n"
        f"See it in a browser:   {link}\n"
        f"Lend this machine:     {how_to_lend(config)}\n"
        + "".join(f"It lent here before:   {start}\n" for start in again)
        + (
            f"Lend another machine:  start the campus with `{ours} up --listen ADDRESS` instead\n"
            if listen in LOOPBACK
            else f"Lend another machine:  {ours} invite > lab1.token, and there: "
            "rn agent --token-file lab1.token\n"
        )
    )
    return 0


def how_to_lend(config: Config) -> str:
    """The agent looks for GPUs as we do here, and refuses to start without any."""
    if find.found():
        return f"{config.rn} agent --detach && {config.rn} lend"
    return (
        f"{config.rn} agent --gpus 1 --detach && {config.rn} lend"
        "   (declares one: no GPU was found here)"
    )


def down(
    *,
    config: Config,
    now: bool = False,
    sure: Callable[[list[JobRecord], list[str]], bool] = lambda _jobs, _fates: True,
) -> int:
    """`sure` is asked if jobs will stand still, and told what will become of them. They are asked
    for a last save first, unless it is to be `now`."""
    ours = _agents_here(config)
    campus_ends = daemon.running(config.state / "up.pid") is not None
    jobs = (_living_jobs(config) if ours or campus_ends else None) or []
    told = fates(jobs, ours=set(ours), campus_ends=campus_ends)
    stopping = [
        job for job in jobs if job.holder is not None and (campus_ends or _is_on(job, ours))
    ]
    if stopping and not sure(stopping, told):
        return 1
    if ours and not now:
        here = {job.id: job for job in jobs if _is_on(job, ours)}
        _save_all(list(ours.values()), len(here))
        left = _living_jobs(config)
        if left is not None:
            told = fates(left, ours=set(ours), campus_ends=campus_ends, before=here)
    with waiting("ending what runs here"):
        ended = list(dict.fromkeys([*(f"agent {name}" for name in ours), *end_all(config)]))
    sys.stderr.write(f"Ended {', '.join(ended)}.\n" if ended else "Nothing was running here.\n")
    for line in told:
        sys.stderr.write(f"{line}\n")
    welcome = [name for name in ours if not is_put_out(config, name)]
    if welcome:
        sys.stderr.write(
            f"Agents are not started by `{config.rn} up`; start them again, each as before: "
            + "; ".join(_start_again(config, name) for name in welcome)
            + "\n"
        )
    return 0


def _save_all(agents: list[daemon.Daemon], jobs: int) -> None:
    """Agents that are told to leave in peace have their guests saved, and end with them."""
    if jobs:
        sys.stderr.write(
            f"Asking {show_count(jobs, 'job')} here for a last save, for up to {SAVE_S:.0f} s "
            "(Ctrl-C ends the wait).\n"
        )
    with waiting("saving what runs here"), contextlib.suppress(KeyboardInterrupt):
        daemon.tell(*agents, number=signal.SIGINT, patience_s=SAVE_S)


def lent_before(config: Config) -> list[str]:
    """The agents that have lent something here, do not run now, and may come back."""
    names = [file.parent.name for file in config.agents.glob(f"*/{FILE}") if has_lent(file)]
    running = _agents_here(config)
    return sorted(name for name in names if name not in running and not is_put_out(config, name))


def _start_again(config: Config, name: str) -> str:
    told = config.origins.get("state") == "flag"
    return start_again(config.agents / name, state=config.state if told else None)


def is_put_out(config: Config, name: str) -> bool:
    """Whether it was a node of the campus that is kept here, and is none any more, as far as is
    known."""
    try:
        theirs = (config.agents / name / "tls" / "ca.crt").read_bytes()
        ours = ca.load_ca(config.state / "ca").pem
        return theirs == ours and name not in Register(config.state).nodes()
    except (OSError, BadConfig):
        return False


def fates(
    jobs: list[JobRecord],
    *,
    ours: set[str],
    campus_ends: bool,
    before: Mapping[JobId, JobRecord] = MappingProxyType({}),
) -> list[str]:
    """What will become of each job when these agents end, and with them the campus or not; those
    that were here `before` have been asked for a last save since."""
    asked = [job for job in jobs if job.id in before and job.holder is None]
    saved = [job for job in asked if job.newest and job.newest != before[job.id].newest]
    here = [job for job in jobs if _is_on(job, ours) or (job in asked and job not in saved)]
    waiting = [job for job in jobs if job.holder is None and job not in asked]
    elsewhere = [job for job in jobs if job.holder is not None and job not in here]
    when = "after the next `rn up`" if campus_ends else "as soon as another node has a place"
    groups = [
        (f"Saved, and go on {when}", saved),
        (f"Go on from their last checkpoint {when}", [job for job in here if job.newest]),
        (f"Begin again {when}, since they were never saved", [j for j in here if not j.newest]),
    ]
    if campus_ends:
        groups += [
            (f"Go on waiting {when}", waiting),
            (f"Stand still on other machines, and go on there {when}", elsewhere),
        ]
    else:
        groups.append(("Moved to other machines", [job for job in elsewhere if job.id in before]))
    return [
        f"{fate}: {', '.join(f'{job.spec.name} ({job.id})' for job in concerned)}."
        for fate, concerned in groups
        if concerned
    ]


def _is_on(job: JobRecord, nodes: Collection[str]) -> bool:
    return any(node in nodes for node in job.seats or (job.holder,))


def _agents_here(config: Config) -> dict[str, daemon.Daemon]:
    """The agents that `down` would end."""
    pid_files = sorted(config.agents.glob("*/agent.pid"))
    found = {file.parent.name: daemon.running(file) for file in pid_files}
    return {name: agent for name, agent in found.items() if agent is not None}


def _living_jobs(config: Config) -> list[JobRecord] | None:
    """None if the gateway does not say."""
    try:
        return Gateway(config).jobs(ended=False)
    except ReclaimNetError:
        return None


def end_all(config: Config) -> list[str]:
    """End what runs in the background here, agents first, so that they can say goodbye; returns
    what it was."""
    agents = _agents_here(config)
    # All at once: what the first gives back must not be taken by one that ends next.
    daemon.end(*agents.values(), patience_s=AGENT_END_S)
    ended = [f"agent {name}" for name in agents]
    for file in config.agents.glob("*/agent.pid"):
        file.unlink(missing_ok=True)
    orphaned = [run.parent.name for run in sorted(config.agents.glob("*/run")) if _end_guests(run)]
    ended += [f"guests that agent {name} had left" for name in orphaned]
    pid_file = config.state / "up.pid"
    campus = daemon.running(pid_file)
    if campus is not None:
        daemon.end(campus, patience_s=END_S)
        ended.append("the campus")
    pid_file.unlink(missing_ok=True)
    for folder in server_folders(config):
        left_over = running_server(folder)
        if left_over is not None:
            # Only if the gateway was killed: it stops its servers itself.
            stop_server(left_over)
            ended.append("its NATS server")
    (config.state / "campus.json").unlink(missing_ok=True)
    return ended


def _end_guests(run: Path) -> bool:
    """End what an agent left that was killed; whether there was any."""
    over: queue.SimpleQueue[object] = queue.SimpleQueue()
    try:
        runner = Runner(
            run, lambda report: over.put(report) if isinstance(report, Exited) else None
        )
    except Unavailable:
        # Another agent has taken the place, in the foreground perhaps.
        return False
    try:
        left = runner.adopt()
        for attempt in left:
            runner.scrub(attempt.job, attempt.epoch)
        for _ in [attempt for attempt in left if attempt.exit is None]:
            over.get(timeout=END_S)
    except queue.Empty:
        raise Unavailable(f"guests in {run} do not end; end them by hand") from None
    finally:
        runner.close()
    for place in SCRATCH:
        shutil.rmtree(run.parent / place, ignore_errors=True)
    return bool(left)


async def _serve(
    config: Config,
    listen: str,
    gateway_port: int,
    *,
    read_only: bool,
    servers: int,
    secure: bool,
) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with daemon.the_only_one(config.state / "up.pid", "a campus"):
        async with contextlib.AsyncExitStack() as stack:
            stack.callback((config.state / "campus.json").unlink, missing_ok=True)
            authority = ca.make_ca(config.state / "ca")
            since = _sealed_since(config)
            key = _gateway_key(config.state / "gateway.key")
            register = Register(config.state)
            standing = register.invite(valid=STANDING, once=False)
            nats = _Nats(config, listen, register, key, authority, servers)
            stack.callback(nats.stop)
            url = await asyncio.to_thread(nats.start)
            keeping = asyncio.create_task(nats.keep())
            stack.callback(keeping.cancel)
            authority_text = authority.pem.decode()
            witness = Witness(
                GATEWAY, key=key, seal=Seal(authority_text, authority.key), sealed_since=since
            )
            campus = await _connected(url, key, authority_text, servers, witness)
            stack.push_async_callback(campus.close)
            await campus.serve_enrol(_Porter(campus, register, nats, authority).take_in)
            nats_token = str(Invitation(url=url, ca=authority_text, secret=standing))
            ca.write_private(config.state / "join-token", nats_token.encode() + b"\n")
            token = _secret(config.state / "gateway-token")
            look_token = _secret(config.state / "look-token")
            vault = stack.enter_context(
                Vault(config.state / "gateway-vault", quota_bytes=FETCH_QUOTA)
            )
            notifier = Notifier(config)
            fetcher = Fetcher(vault=vault, context=_own_context(config, authority))

            def ready(port: int) -> None:
                host = _own_address(listen)
                host = f"[{host}]" if ":" in host else host
                gateway_url = f"{'https' if secure else 'http'}://{host}:{port}"
                _leave(config, gateway_url=gateway_url, nats_url=url, nats_token=nats_token)
                ca_text = authority_text if secure else None
                remember_gateway(config.file, url=gateway_url, token=token, ca=ca_text)
                _log.info("the gateway serves at %s, NATS at %s", gateway_url, url)

            await gateway.serve(
                listen,
                gateway_port,
                campus,
                token,
                stop,
                look_token=look_token,
                people=register.people,
                tls=_gateway_tls(config, authority, listen) if secure else None,
                read_only=read_only,
                on_ready=ready,
                fetcher=fetcher,
                more=gateway_page.handlers(),
                watchers=[notifier.run] if notifier.is_wanted else [],
            )
    return 0


def _own_address(listen: str) -> str:
    """Where our own commands find what listens there."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen, listen)


def page_link(url: str, token: str) -> str:
    """Behind # the token stays in the browser: it is not sent, logged or kept in the address."""
    return f"{url}/#token={token}"


def server_folders(config: Config) -> list[Path]:
    """Where the servers of this campus keep what they store."""
    count = _number(config.state / "servers") or 1
    return [config.state / ("nats" if rank == 0 else f"nats-{rank + 1}") for rank in range(count)]


def _server_count(config: Config, asked: int | None) -> int:
    """A store that one server made cannot be taken over by three, nor the other way round."""
    file = config.state / "servers"
    made = _number(file) or (1 if (config.state / "nats").exists() else 0)
    if made and asked not in (None, made):
        raise UsageError(
            f"this campus was made with {made} server{'s' * (made > 1)}, and stays so; "
            "to begin anew, give another place with --state"
        )
    count = made or asked or 1
    file.write_text(str(count))
    return count


def _sealed_since(config: Config) -> int:
    """From when on every job of this campus has its seal. What an earlier version has stored is
    taken as it is, and sealed if it still waits or runs."""
    file = config.state / "sealed-since"
    if not file.exists():
        file.write_text(str(time.time_ns() if server_folders(config)[0].exists() else 0))
    return _number(file)


async def _connected(url: str, key: Key, authority: str, servers: int, witness: Witness) -> Campus:
    """Several servers need a moment until they agree on who leads."""
    give_up = time.monotonic() + READY_S
    while True:
        try:
            tls = ca.server_known_by(authority)
            return await Campus.connect(
                url, key, GATEWAY, tls=tls, replicas=servers, witness=witness
            )
        except Unavailable:
            if servers == 1 or time.monotonic() > give_up:
                raise
            await asyncio.sleep(LOOK_AGAIN_S)


class _Nats:
    """The campus's servers: each started again whenever it dies, on the port that agents know, and
    told whenever the register changes."""

    def __init__(
        self,
        config: Config,
        listen: str,
        register: Register,
        gateway: Key,
        authority: ca.Authority,
        count: int,
    ) -> None:
        self._state = config.state
        self._folders = server_folders(config)
        self._listen = listen
        self._register = register
        self._gateway = gateway.public
        self._credentials = _server_tls(config.state / "nats-tls", authority, listen)
        self._tls = Tls(certificate=self._credentials.certificate, key=self._credentials.key)
        self._route_ports = self._kept_route_ports() if count > 1 else []
        self._route_secret = _secret(config.state / "route-secret") if count > 1 else ""
        self._servers: list[Server] = []
        self._applied: int | None = None

    def start(self) -> str:
        """Servers of ours that outlived their gateway go on; otherwise new ones. Their address."""
        stamp: int | None = self._register.stamp()
        for rank, folder in enumerate(self._folders):
            server = running_server(folder)
            if server is None:
                server = self._start_new(rank)
            else:
                stamp = None
            self._port_file(rank).write_text(str(server.port))
            self._servers.append(server)
        # A new server knows who may connect; to tell it again would only disturb the first who do.
        self._applied = stamp
        self.apply()
        return ",".join(server.url for server in self._servers)

    def _start_new(self, rank: int) -> Server:
        port = _number(self._port_file(rank))
        if port:
            try:
                return self._start_on(rank, port)
            except Unavailable as error:
                _log.warning("port %d is not to be had (%s); agents must join anew", port, error)
        return self._start_on(rank, _free_port(self._listen))

    def _start_on(self, rank: int, port: int) -> Server:
        return start_server(
            self._folders[rank],
            self._register.access(self._gateway),
            host=self._listen,
            port=port,
            tls=self._tls,
            routes=self._routes(rank),
        )

    def _routes(self, rank: int) -> Routes | None:
        if not self._route_ports:
            return None
        return Routes(
            name=self._folders[rank].name,
            port=self._route_ports[rank],
            others=tuple(port for other, port in enumerate(self._route_ports) if other != rank),
            secret=self._route_secret,
            tls=self._tls,
            authority=self._credentials.authority,
        )

    def _kept_route_ports(self) -> list[int]:
        """The same over restarts, since the others know them."""
        file = self._state / "route-ports"
        try:
            return [int(word) for word in file.read_text().split()]
        except (OSError, ValueError):
            ports = [_free_port(self._listen) for _ in self._folders]
            file.write_text(" ".join(map(str, ports)))
            return ports

    def _port_file(self, rank: int) -> Path:
        return self._state / ("nats-port" if rank == 0 else f"nats-port-{rank + 1}")

    def apply(self) -> None:
        """Let the servers know who may connect now."""
        stamp = self._register.stamp()
        if stamp != self._applied:
            access = self._register.access(self._gateway)
            for rank, server in enumerate(self._servers):
                reload_access(server, access, tls=self._tls, routes=self._routes(rank))
            self._applied = stamp

    async def keep(self) -> None:
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            for rank, server in enumerate(self._servers):
                if not is_running(server):
                    _log.warning("a NATS server has died; it is started again")
                    with contextlib.suppress(Unavailable):
                        again = await asyncio.to_thread(self._start_on, rank, server.port)
                        self._servers[rank] = again
            self.apply()

    def stop(self) -> None:
        for server in self._servers:
            stop_server(server)


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _own_context(config: Config, authority: ca.Authority) -> SSL.Context:
    key = ca.new_key()
    credentials = ca.keep(
        config.state / "gateway-tls",
        certificate=ca.issue(authority, ca.GATEWAY, key),
        key=key,
        authority=authority.pem,
    )
    return ca.client_context(credentials)


def _gateway_tls(config: Config, authority: ca.Authority, listen: str) -> ca.Credentials:
    """Our own commands know it by one name; the others are for browsers that trust the campus."""
    key = ca.new_key()
    names = dict.fromkeys([CAMPUS_HOST, socket.gethostname(), _own_address(listen)])
    return ca.keep(
        config.state / "https",
        certificate=ca.issue(authority, CAMPUS_HOST, key, list(names)),
        key=key,
        authority=authority.pem,
    )


class _Porter:
    """Takes newcomers in, from any thread."""

    def __init__(
        self, campus: Campus, register: Register, nats: _Nats, authority: ca.Authority
    ) -> None:
        self._campus = campus
        self._register = register
        self._nats = nats
        self._authority = authority
        self._loop = asyncio.get_running_loop()

    def take_in(self, asked: EnrolmentAsked) -> Enrolment:
        request = asked.certificate_request.encode()
        name = ca.requested_name(request)
        node = ca.node_of(name)
        if node is None or not NAME.fullmatch(node):
            raise Forbidden(f"only nodes are taken in here, not {name!r}")
        self._register.take_in(
            secret=asked.invitation, node=node, public_key=asked.public_key, lives=self._lives(node)
        )
        certificate = ca.issue(self._authority, name, request)
        self._nats.apply()
        _log.info("%s was taken in", node)
        return Enrolment(
            certificate=certificate.decode(), ca=self._authority.pem.decode(), seals=True
        )

    def _lives(self, node: NodeId) -> bool:
        reading = asyncio.run_coroutine_threadsafe(self._campus.read_card(node), self._loop)
        card = reading.result()
        return card is not None and time.time_ns() - card.beat < LIVELY.given_up_after


def _gateway_key(path: Path) -> Key:
    try:
        return Key(name=GATEWAY, seed=path.read_text())
    except FileNotFoundError:
        key = new_key(GATEWAY)
        ca.write_private(path, key.seed.encode())
        return key


def _server_tls(folder: Path, authority: ca.Authority, listen: str) -> ca.Credentials:
    key = ca.new_key()
    # Programs know a server by the campus's name, other servers know it by its address.
    names = [CAMPUS_HOST, {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen, listen)]
    return ca.keep(
        folder,
        certificate=ca.issue(authority, CAMPUS_HOST, key, names),
        key=key,
        authority=authority.pem,
    )


def _free_port(host: str) -> int:
    """Chosen by us, since the server cannot be told anything later if it chose by itself."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise Unavailable(f"nothing can listen on {host} ({error.strerror})") from error
        return int(probe.getsockname()[1])


def _healthy(config: Config) -> bool:
    url = urlsplit(_left(config).get("gateway_url", ""))
    if not url.hostname:
        return False
    try:
        secure = url.scheme == "https"
        authority = ca.load_ca(config.state / "ca").pem.decode() if secure else None
        connection = connection_to(
            url.hostname, url.port, ca=authority, secure=secure, timeout=HEALTH_TIMEOUT_S
        )
        with contextlib.closing(connection):
            connection.request("GET", "/api/v1/health")
            return bool(json.loads(connection.getresponse().read())["ok"])
    except (OSError, ValueError, KeyError, http.client.HTTPException):
        return False


def _leave(config: Config, *, gateway_url: str, nats_url: str, nats_token: str) -> None:
    """What agents on this machine need to join."""
    fields = {"gateway_url": gateway_url, "nats_url": nats_url, "nats_token": nats_token}
    ca.write_private(config.state / "campus.json", json.dumps(fields).encode())


def _left(config: Config) -> dict[str, Any]:
    try:
        fields = json.loads((config.state / "campus.json").read_text())
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _secret(path: Path) -> str:
    """Made once; it stays the same over restarts, so that agents find their way back."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        secret = secrets.token_urlsafe(24)
        ca.write_private(path, secret.encode() + b"\n")
        return secret
