"""The agent: speaks for one node. It puts the mind into the live world and listens to its owner."""

import asyncio
import contextlib
import dataclasses
import getpass
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final

import msgspec

from reclaimnet import wire
from reclaimnet.adapters.gpu import find
from reclaimnet.adapters.linux import criu, sandbox
from reclaimnet.adapters.linux.boot import boot_id
from reclaimnet.adapters.linux.sandbox import Sandbox
from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.tls import ca
from reclaimnet.adapters.vault.store import Vault
from reclaimnet.adapters.vault.transfer import ChunkServer
from reclaimnet.apps import daemon
from reclaimnet.apps.cli_base import waiting
from reclaimnet.apps.client import ask_local
from reclaimnet.apps.config import DEFAULT_GUEST_DISK, DEFAULT_VAULT_QUOTA, Config, did_you_mean
from reclaimnet.apps.guard_client import DEFAULT_SOCKET
from reclaimnet.apps.guarded import Guarded
from reclaimnet.apps.live.clock import Clock
from reclaimnet.apps.live.serving import Serving
from reclaimnet.apps.live.world import LiveWorld
from reclaimnet.apps.membership import joined
from reclaimnet.apps.notes import write_down
from reclaimnet.apps.register import NODE_NAME, read_invitation
from reclaimnet.engine.body import WHOLE, Body
from reclaimnet.engine.dispatcher import dispatcher_role
from reclaimnet.engine.neighbourhood import LIVELY, Timing
from reclaimnet.engine.node import Node
from reclaimnet.errors import (
    BadConfig,
    Damaged,
    NotFound,
    ReclaimNetError,
    Unavailable,
    UsageError,
)
from reclaimnet.model import events as ev
from reclaimnet.model.asking import (
    LendRequest,
    ReclaimRequest,
    Reply,
    Request,
    StatusRequest,
)
from reclaimnet.model.market import Cause, Gpu, GpuId, NodeId, NoticeId, Offer, Terms
from reclaimnet.model.units import SECOND, parse_rate, show_duration
from reclaimnet.model.work import Saving
from reclaimnet.policy.suite import SUITES
from reclaimnet.policy.topology import Topology, parse_topology

NO_SANDBOX: Final = "off"
ASSUMED_UPLINK: Final = 125_000_000
"""Bytes a second: a gigabit, until somebody says or transfers show what it is."""
LEAVE_AT_MOST: Final = 30 * SECOND
"""How long Ctrl-C waits for guests to leave."""
SAFETY: Final = SECOND
"""Before a batch system's own deadline: it kills without asking."""
READY_S: Final = 30.0
PART_S: Final = 2.0
END_S: Final = 5.0
MAX_REQUEST_BYTES: Final = 1 << 16

_log = logging.getLogger("reclaimnet.agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """A batch job inside which the agent lives: its signals are the end of the loan."""

    ends: int
    grace: int
    """What SIGUSR1 leaves: the batch system preempts us."""
    kill_wait: int
    """What SIGTERM leaves before SIGKILL."""

    def left(self, number: signal.Signals, now: int) -> int:
        """How long guests have after a signal."""
        promised = self.kill_wait if number is signal.SIGTERM else self.grace
        return max(min(promised, self.ends - now) - SAFETY, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All an agent needs to know."""

    node: NodeId
    folder: Path
    url: str
    token: str
    """The invitation to the campus."""
    gpus: tuple[Gpu, ...]
    host: str = "127.0.0.1"
    """The address under which others reach this node's chunks."""
    lend: LendRequest | None = None
    vault_quota: int = DEFAULT_VAULT_QUOTA
    zone: str = "campus"
    timing: Timing = LIVELY
    suite: str = "standby"
    guard: Path | None = None
    uplink_bps: int | None = None
    """What the node's uplink carries, in bytes a second; None if nobody has said."""
    grace: int | None = None
    """How long guests have to leave after SIGTERM; None: it ends them at once."""
    allocation: Allocation | None = None
    topology: Topology | None = None
    sandbox: Sandbox | None = None
    """What guests run in; None: as any process of the agent's user."""


def main(
    *,
    config: Config,
    join: str | None,
    token: str | None,
    name: str | None,
    gpus: int | None,
    lend: bool,
    notice: int,
    vault_quota: int,
    detach: bool,
    suite: str = "standby",
    guard: Path | None = None,
    address: str | None = None,
    uplink: str | None = None,
    grace: int | None = None,
    zone: str | None = None,
    topology: Path | None = None,
    guests: str = NO_SANDBOX,
    shares: tuple[Path, ...] = (),
    guest_disk: int = DEFAULT_GUEST_DISK,
    campus_nets: tuple[str, ...] = (),
) -> int:
    """Behind `rn agent`."""
    if suite not in SUITES:
        raise UsageError(f"there is no suite {suite}{did_you_mean(suite, list(SUITES))}")
    node = NodeId(name or socket.gethostname().partition(".")[0])
    if not NODE_NAME.fullmatch(node):
        raise UsageError(
            f"{node!r} cannot be a node's name; use letters, digits, dots and dashes: --name lab1"
        )
    box = _sandbox(guests, shares, guest_disk, campus_nets, hidden=config.state)
    plan, uplink_bps = _network(node, uplink, topology)
    url, secret = campus_of(config, join, token)
    if box is None and token is not None:
        sys.stderr.write(
            f"Guests will see what {getpass.getuser()} sees on this machine; --sandbox open shows "
            "them nothing but their own files and GPUs.\n"
        )
    folder = config.agents / node
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    running = daemon.running(folder / "agent.pid")
    if running is not None:
        raise UsageError(
            f"an agent for {node} runs here already (pid {running.pid}); "
            "give this one another --name"
        )
    if detach:
        return _detached(
            config,
            node,
            folder,
            url=url,
            token=secret,
            gpus=gpus,
            lend=lend,
            notice=notice,
            vault_quota=vault_quota,
            suite=suite,
            guard=guard,
            address=address,
            uplink=uplink,
            grace=grace,
            zone=zone,
            topology=topology,
            guests=guests,
            box=box,
        )
    plan = _plan_in(topology) if topology is not None else None
    found = find.declared(node, gpus) if gpus is not None else find.found()
    if not found:
        raise UsageError(
            "no GPU was found here; declare some to try things out, for example: rn agent --gpus 2"
        )
    settings = Settings(
        node=node,
        folder=folder,
        url=url,
        token=secret,
        gpus=found,
        host=address or own_address(url),
        lend=LendRequest(notice=notice) if lend else None,
        vault_quota=vault_quota,
        suite=suite,
        guard=guard,
        uplink_bps=uplink_bps,
        grace=grace,
        zone=_zone_of(node, zone, plan),
        topology=plan,
        sandbox=box,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # It warns of every TLS connection that ends.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    return asyncio.run(run(settings))


def _sandbox(
    guests: str,
    shares: tuple[Path, ...],
    disk_bytes: int,
    campus_nets: tuple[str, ...],
    *,
    hidden: Path,
) -> Sandbox | None:
    """Refused if it cannot be had: no guest ever runs with less than was asked for."""
    if guests == NO_SANDBOX:
        if shares:
            raise UsageError("--share is for guests in a sandbox; add --sandbox none, for example")
        return None
    try:
        campus = [ip_network(text) for text in campus_nets]
    except ValueError as error:
        raise UsageError(f"--campus-net: {error}; give one like 10.0.0.0/8") from error
    network = sandbox.Network(guests)
    obstacle = sandbox.obstacle(network)
    if obstacle is not None:
        raise Unavailable(
            f"guests cannot have a sandbox here: {obstacle}; mend it, or choose --sandbox off"
        )
    return Sandbox(
        network=network,
        campus=tuple(campus) or sandbox.PRIVATE,
        shares=tuple(share.resolve() for share in shares),
        hidden=(hidden,),
        disk_bytes=disk_bytes,
    )


def _plan_in(file: Path) -> Topology:
    try:
        text = file.read_text()
    except OSError as error:
        raise BadConfig(f"{file} cannot be read: {error.strerror}") from error
    return parse_topology(text, file=str(file))


def _zone_of(node: NodeId, name: str | None, plan: Topology | None) -> str:
    zone = name if name is not None else plan.zone(node) if plan is not None else WHOLE
    if not NODE_NAME.fullmatch(zone):
        raise UsageError(f"{zone!r} cannot be a zone's name; use letters, digits, dots and dashes")
    return zone


async def run(settings: Settings) -> int:
    """Live until told to end. SIGINT leaves in peace, and so does SIGTERM where a grace was given;
    otherwise it ends guests at once. SIGHUP leaves them to the next agent, which is how one
    restarts without disturbing anybody."""
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    numbers += [signal.SIGUSR1] if settings.allocation is not None else []
    for number in numbers:
        loop.add_signal_handler(number, signals.put_nowait, number)
    broken: asyncio.Future[None] = loop.create_future()

    def fail(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception") or RuntimeError(context["message"])
        _log.error("%s", context["message"], exc_info=error)
        if not broken.done():
            broken.set_exception(error)

    loop.set_exception_handler(fail)
    agent = Agent(settings)
    with daemon.the_only_one(settings.folder / "agent.pid", f"an agent for {settings.node}"):
        try:
            async with asyncio.TaskGroup() as group:
                living = group.create_task(agent.live())
                stopping = group.create_task(_until_told(agent, signals, broken))
                await stopping
                living.cancel()
        except BaseExceptionGroup as error:
            cause = _cause(error)
            if not isinstance(cause, ReclaimNetError):
                _log.exception("the agent is broken")
            raise cause from error
    return 0


def _cause(error: BaseException) -> BaseException:
    """The first of what went wrong: a sentence for people if there is one."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [_cause(part) for part in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, ReclaimNetError)), causes[0])


async def _until_told(
    agent: "Agent", signals: "asyncio.Queue[signal.Signals]", broken: "asyncio.Future[None]"
) -> None:
    waiting = asyncio.ensure_future(signals.get())
    first: list[asyncio.Future[Any]] = [waiting, broken]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if broken.done():
        broken.result()
    told = waiting.result()
    allocation, grace = agent.settings.allocation, agent.settings.grace
    if allocation is not None and told in (signal.SIGUSR1, signal.SIGTERM):
        await _leave_allocation(agent, allocation, told, signals)
        return
    match told:
        case signal.SIGTERM if grace is None:
            await agent.end_guests()
        case signal.SIGINT | signal.SIGTERM:
            leaving = asyncio.ensure_future(agent.leave(grace if told is signal.SIGTERM else None))
            again = asyncio.ensure_future(signals.get())
            await asyncio.wait([leaving, again], return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            again.cancel()
            await agent.end_guests()
        case _:
            pass


async def _leave_allocation(
    agent: "Agent",
    allocation: Allocation,
    told: signal.Signals,
    signals: "asyncio.Queue[signal.Signals]",
) -> None:
    """The batch system takes its nodes back; a second signal leaves less time than the first."""
    while True:
        leaving = asyncio.ensure_future(agent.leave_allocation(allocation, told))
        again = asyncio.ensure_future(signals.get())
        await asyncio.wait([leaving, again], return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            again.cancel()
            leaving.result()
            return
        leaving.cancel()
        told = again.result()


class Agent:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._clock = Clock()
        self._world: LiveWorld | None = None
        self._mind: Node | None = None
        self._requests = 0
        self._watching: asyncio.Task[None] | None = None
        self._parting = False
        self._unwritten = ""
        """Why the owner's last word is not on disk; empty if it is."""
        self._guests_known = asyncio.Event()
        """Before that, a reclaim would find nobody who has to leave."""

    # --- living ----------------------------------------------------------------------------

    async def live(self) -> None:
        settings = self.settings
        async with contextlib.AsyncExitStack() as stack:
            # The owner's door opens first: while the campus is away, it says so.
            await self._open_door(stack)
            campus, membership = await joined(
                url=settings.url,
                invitation=settings.token,
                node=settings.node,
                folder=settings.folder / "tls",
                lease=settings.timing.lease,
            )
            credentials = membership.credentials
            stack.push_async_callback(campus.close)
            stack.push_async_callback(self._part, campus)
            vault = stack.enter_context(
                Vault(settings.folder / "vault", quota_bytes=settings.vault_quota)
            )
            guard = _guard(settings)
            box = settings.sandbox
            if guard is not None and box is not None and box.network is sandbox.Network.CAMPUS:
                guard.close()
                raise UsageError(
                    "guests that a guard houses are not in our own control group, which is what "
                    "keeps packets on the campus: choose --sandbox none or open beside a guard"
                )
            if guard is not None:
                stack.callback(guard.close)
            obstacle = await asyncio.to_thread(criu.obstacle)
            if settings.sandbox is not None:
                obstacle = "guests are in a sandbox here, and CRIU cannot save one"
            gate = _Gate()
            server = stack.enter_context(
                ChunkServer(
                    vault,
                    ca.server_context(credentials),
                    host=settings.host,
                    may_read=gate.may_read,
                    may_go_on=gate.may_go_on,
                    listener=guard.listen() if guard is not None else None,
                )
            )
            mind = Node(
                Body(
                    node=settings.node,
                    provider=getpass.getuser(),
                    zone=settings.zone,
                    address=server.address,
                    uplink_bps=settings.uplink_bps or ASSUMED_UPLINK,
                    uplink_assumed=settings.uplink_bps is None,
                    shelf_bytes=vault.room(),
                    timing=settings.timing,
                    topology=settings.topology,
                    holds_slots=guard is not None and guard.holds_slots(),
                    abilities=() if obstacle else (str(Saving.CRIU),),
                    obstacles=(f"{Saving.CRIU}: {obstacle}",) if obstacle else (),
                ),
                SUITES[settings.suite],
            )
            world = LiveWorld(
                node=settings.node,
                folder=settings.folder,
                mind=mind,
                campus=campus,
                vault=vault,
                client=ca.client_context(credentials),
                clock=self._clock,
                guard=guard,
                sendings=server.sendings,
                sandbox=settings.sandbox,
            )
            stack.push_async_callback(world.close)
            stack.push_async_callback(world.flush)
            gate.serving, self._world, self._mind = world.serving, world, mind
            gate.serves = lambda: mind.provider.serves(self._clock.now())
            world.after_owner_event = self._remember_provider
            await self._wake_up(campus, vault)
            await self._serve(campus)

    async def _wake_up(self, campus: Campus, vault: Vault) -> None:
        """Take up what the agent before us left: the owner's word first, then its guests."""
        world, mind = self._running()
        for event in self._remembered_provider():
            world.deliver(event)
        me = self.settings.node
        theirs = await campus.records.find(
            lambda r: me in (r.holder, *r.seats) or bool(vault.manifests(r.id))
        )
        records = {record.id: record for record in theirs}
        for attempt in await world.processes.adopt(records.values()):
            held = attempt.suspended_at
            since = None if held is None else self._clock.wall(held)
            found = ev.ProcessFound(
                record=records[attempt.job], gpus=attempt.gpus, suspended_at=since
            )
            world.deliver(found)
            if attempt.exit is not None:
                world.processes.exited(attempt.exit)
            elif attempt.waiting:
                world.runner.resume(attempt.job, attempt.epoch)
        kept = tuple(sorted({record_id for record_id in records if vault.manifests(record_id)}))
        world.deliver(ev.CopiesFound(jobs=kept))
        for record in records.values():
            known = mind.guests.holder(record.id) is not None
            if record.holder == self.settings.node and not known:
                world.deliver(ev.RecordSeen(job=record.id, record=record))
        self._guests_known.set()
        if self.settings.lend is not None and mind.provider.offer is None:
            await self.answer(self.settings.lend)
        world.deliver(ev.Woke())

    async def _open_door(self, stack: contextlib.AsyncExitStack) -> None:
        path = self.settings.folder / "control.sock"
        path.unlink(missing_ok=True)
        control = await asyncio.start_unix_server(
            self._control, sock=_bound(path), limit=MAX_REQUEST_BYTES
        )
        path.chmod(0o600)
        stack.callback(path.unlink, missing_ok=True)
        stack.callback(control.close)

    async def _part(self, campus: Campus) -> None:
        """The last word of an agent whose guests have ended: it will not be missed."""
        if not self._parting or self._mind is None:
            return
        card = dataclasses.replace(
            self._mind.card(), beat=self._clock.now(), gpus=(), vacant=(), jobs=(), parting=True
        )
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(PART_S):
                await campus.beat(card)

    async def _serve(self, campus: Campus) -> None:
        world, mind = self._running()
        node = self.settings.node
        await campus.listen(node, world.deliver)
        await campus.serve_asks(node, self.answer)
        _log.info("%s is ready, with %d GPUs", node, len(self.settings.gpus))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._hear(campus))
            for role in mind.roles():
                group.create_task(
                    campus.hold_role(
                        role,
                        node,
                        self.settings.timing.role,
                        lambda event: self._role(event, campus, group),
                    )
                )

    async def _hear(self, campus: Campus) -> None:
        world, mind = self._running()
        # Whoever dispatches wants to know of newcomers at once.
        hearing = campus.watch_cards(is_urgent=lambda: mind.dispatcher is not None)
        async with contextlib.aclosing(hearing) as cards:
            async for heard in cards:
                if heard.age < mind.body.timing.lease:
                    world.hear(heard.card)

    def _role(
        self, event: ev.RoleWon | ev.RoleLost, campus: Campus, group: asyncio.TaskGroup
    ) -> None:
        world, _ = self._running()
        world.deliver(event)
        if event.role != dispatcher_role(self.settings.zone):
            return
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if isinstance(event, ev.RoleWon):
            self._watching = group.create_task(self._watch(campus))

    async def _watch(self, campus: Campus) -> None:
        """While we dispatch, every change of a record is news."""
        world, _ = self._running()
        with contextlib.suppress(asyncio.CancelledError):
            async with contextlib.aclosing(campus.records.watch()) as records:
                async for record in records:
                    world.deliver(ev.RecordSeen(job=record.id, record=record))

    # --- the owner -------------------------------------------------------------------------

    async def answer(self, request: Request) -> Reply:
        """What a person asked, locally or through the gateway."""
        world, mind = self._running()
        if isinstance(request, StatusRequest):
            return Reply(ok=True, text=wire.encode_card(mind.card()).decode())
        await self._guests_known.wait()
        match request:
            case LendRequest():
                event: ev.LendAsked | ev.ReclaimAsked | ev.WithdrawAsked = self._lend(request)
            case ReclaimRequest():
                event = self._reclaim(request)
            case _:
                event = ev.WithdrawAsked(request=self._mint())
        answer = await world.ask(event)
        text = answer.text
        if answer.ok and self._unwritten:
            text += (
                f" (It cannot be written down: {self._unwritten}; mend that before the agent is "
                "restarted, or say it again then.)"
            )
        return Reply(ok=answer.ok, text=text)

    def _lend(self, request: LendRequest) -> ev.LendAsked:
        gpus = self.settings.gpus
        if request.which:
            chosen = {self._gpu(word) for word in request.which}
            gpus = tuple(gpu for gpu in gpus if gpu.id in chosen)
        count = len(gpus) if request.gpus is None else request.gpus
        if not 0 < count <= len(gpus):
            raise UsageError(f"{self.settings.node} has {len(gpus)} GPUs; it cannot lend {count}")
        if request.notice < 0:
            raise UsageError("a notice cannot be negative; use 0s for none")
        offer = Offer(
            provider=getpass.getuser(),
            gpus=gpus[:count],
            terms=Terms(
                notice=request.notice,
                users=request.users,
                hours=request.hours,
                utc_offset=request.utc_offset,
                maintenance=request.maintenance,
                ends=request.ends,
            ),
        )
        return ev.LendAsked(request=self._mint(), offer=offer)

    def _reclaim(self, request: ReclaimRequest) -> ev.ReclaimAsked:
        return ev.ReclaimAsked(
            request=self._mint(),
            gpus=tuple(self._gpu(word) for word in request.gpus),
            grace=request.grace,
            reason=request.reason,
            replaces=self._notice_on(request.gpus) if request.change else None,
        )

    def _notice_on(self, words: tuple[str, ...]) -> NoticeId:
        """The one notice that is running, or the one on these GPUs."""
        _, mind = self._running()
        wanted = {self._gpu(word) for word in words}
        running = [
            notice
            for notice in mind.provider.notices.values()
            if not wanted or wanted & set(notice.gpus)
        ]
        if not running:
            raise NotFound(f"no notice is running on {self.settings.node}, so none can be changed")
        if len(running) > 1:
            raise UsageError("several notices are running; say on which GPU, for example: --gpu 0")
        return running[0].id

    def _gpu(self, word: str) -> GpuId:
        for gpu in self.settings.gpus:
            if word in (str(gpu.index), gpu.id):
                return gpu.id
        known = ", ".join(str(gpu.index) for gpu in self.settings.gpus)
        raise NotFound(f"{self.settings.node} has no GPU {word}; it has {known}")

    async def _control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The owner's own door: it needs neither network nor server."""
        with contextlib.suppress(ConnectionError, asyncio.LimitOverrunError, ValueError):
            line = await reader.readline()
            try:
                reply = await self.answer(wire.decode_request(line))
            except ReclaimNetError as error:
                reply = Reply(ok=False, text=str(error))
            writer.write(wire.encode_reply(reply) + b"\n")
            await writer.drain()
        writer.close()

    # --- what outlives the agent -----------------------------------------------------------

    def _remember_provider(self) -> None:
        """The owner's word is on disk before it is answered. It holds also if that cannot be: it is
        tried again whenever we wake."""
        _, mind = self._running()
        provider = mind.provider
        state = msgspec.to_builtins(
            {
                "boot": boot_id(),
                # What stands is lent again by itself when its hours begin.
                "offer": provider.offer or provider.standing,
                "notices": [
                    {
                        "gpus": n.gpus,
                        "deadline": n.deadline,
                        # The wall may be set before the next agent reads this.
                        "monotonic": self._clock.monotonic(n.deadline),
                        "cause": n.cause,
                        "reason": n.reason,
                    }
                    for n in provider.notices.values()
                ],
            }
        )
        path = self.settings.folder / "provider.json"
        text = json.dumps(state)
        try:
            if not path.exists() or path.read_text() != text:
                write_down(path, text)
            self._unwritten = ""
        except OSError as error:
            if not self._unwritten:
                _log.warning("what was lent and asked back cannot be written down: %s", error)
            self._unwritten = f"{error.strerror or error}"

    def _remembered_provider(self) -> list[ev.Event]:
        path = self.settings.folder / "provider.json"
        try:
            state = json.loads(path.read_text())
            if state["offer"] is None:
                return []
            offer = msgspec.convert(state["offer"], Offer)
            known = {gpu.id for gpu in self.settings.gpus}
            if not {gpu.id for gpu in offer.gpus} <= known:
                raise Damaged("GPUs that were lent are gone")
            same_boot = state.get("boot") == boot_id()
            notices = [
                ev.ReclaimAsked(
                    request=self._mint(),
                    gpus=tuple(GpuId(gpu) for gpu in notice["gpus"]),
                    grace=max(self._left(notice, same_boot=same_boot), 0),
                    cause=Cause(notice["cause"]),
                    reason=str(notice["reason"]),
                )
                for notice in state["notices"]
            ]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, Damaged) as error:
            _log.warning("what was lent before is not known any more (%s); lend again", error)
            return []
        return [ev.LendAsked(request=self._mint(), offer=offer), *notices]

    def _left(self, notice: dict[str, Any], *, same_boot: bool) -> int:
        if same_boot:
            return int(notice["monotonic"]) - time.monotonic_ns()
        return int(notice["deadline"]) - self._clock.now()

    # --- the end ---------------------------------------------------------------------------

    async def leave(self, grace: int | None) -> None:
        """In peace: guests get their notice, or so long, and are gone before we are."""
        if self._world is None:
            return
        world, mind = self._running()
        guests = mind.guests.processes()
        if not guests or mind.provider.offer is None:
            return
        if grace is None:
            grace = min(mind.provider.offer.terms.notice, LEAVE_AT_MOST)
        _log.info(
            "%d jobs have %s to leave; press Ctrl-C again to end them at once",
            len(guests),
            show_duration(grace),
        )
        asked = ev.ReclaimAsked(request=self._mint(), grace=grace, reason="the agent is stopping")
        await world.ask(asked)
        await world.empty()

    async def leave_allocation(self, allocation: Allocation, told: signal.Signals) -> None:
        if self._world is None:
            return
        world, mind = self._running()
        if mind.provider.offer is not None:
            asked = ev.ReclaimAsked(
                request=self._mint(),
                grace=allocation.left(told, self._clock.now()),
                cause=Cause.WALLTIME,
                reason="the batch system takes its node back",
            )
            await world.ask(asked)
        await world.empty()

    async def end_guests(self) -> None:
        if self._world is None:
            return
        world, mind = self._running()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._guests_known.wait()
                for job, epoch in mind.guests.processes():
                    world.runner.end(job, epoch)
                await world.empty()
        self._parting = True

    def _running(self) -> tuple[LiveWorld, Node]:
        if self._world is None or self._mind is None:
            raise Unavailable(
                f"{self.settings.node} has not reached the campus at {self.settings.url} yet; "
                "guests that are left here stand still until then; its log says more"
            )
        return self._world, self._mind

    def _mint(self) -> str:
        self._requests += 1
        return f"{self.settings.node}-{self._requests}"


def _network(
    node: NodeId, uplink: str | None, topology: Path | None
) -> tuple[Topology | None, int | None]:
    """The plan of the campus, and what this node's uplink carries, as far as they were given."""
    plan = _plan_in(topology) if topology is not None else None
    if uplink is None:
        spot = plan.nodes.get(node) if plan is not None else None
        return plan, spot.uplink_bps if spot is not None else None
    try:
        rate = parse_rate(uplink)
    except ValueError as error:
        raise UsageError(f"--uplink: {error}") from error
    if rate <= 0:
        raise UsageError("--uplink: an uplink carries more than nothing; for example 1G or 100M")
    return plan, rate


def _guard(settings: Settings) -> Guarded | None:
    """The one that was named must be there; the usual one is used if it is."""
    path = settings.guard or DEFAULT_SOCKET
    if settings.guard is None and not path.exists():
        return None
    try:
        return Guarded(path)
    except Unavailable:
        if settings.guard is not None:
            raise
        return None


def _bound(path: Path) -> socket.socket:
    """Addresses of sockets are short, those of folders need not be: the folder by its number."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        door.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    return door


class _Gate:
    """Lets the chunk server start before there is a world to ask."""

    def __init__(self) -> None:
        self.serving: Serving | None = None
        self.serves: Callable[[], bool] = lambda: False

    def may_read(self, common_name: str, job: Any) -> bool:
        return (
            self.serving is not None
            and self.may_go_on(common_name)
            and self.serving.may_read(common_name, job)
        )

    def may_go_on(self, common_name: str) -> bool:
        """No other node is served after the owner's deadline: the uplink is its owner's. The
        gateway may still fetch what a job has left, for the user who asks for it."""
        return self.serves() or common_name == ca.GATEWAY


def campus_of(config: Config, join: str | None, token: str | None) -> tuple[str, str]:
    """Where NATS is: as given, or as `rn up` left it on this machine."""
    if token is not None:
        return join or read_invitation(token).url, token
    if join is not None:
        raise UsageError("give the campus's invitation with --token-file FILE")
    try:
        left = json.loads((config.state / "campus.json").read_text())
        return str(left["nats_url"]), str(left["nats_token"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unavailable(
            "no campus runs on this machine; start one with `rn up`, or join one with "
            "--token-file FILE"
        ) from error


def own_address(url: str) -> str:
    """The address of ours from which the campus's server is reached."""
    host, _, port = url.rpartition("//")[2].rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect((host.strip("[]"), int(port)))
        except (OSError, ValueError) as error:
            raise Unavailable(f"{url} cannot be reached: {error}") from error
        return str(s.getsockname()[0])


def _detached(
    config: Config,
    node: NodeId,
    folder: Path,
    *,
    url: str,
    token: str,
    gpus: int | None,
    lend: bool,
    notice: int,
    vault_quota: int,
    suite: str,
    guard: Path | None,
    address: str | None,
    uplink: str | None,
    grace: int | None,
    zone: str | None,
    topology: Path | None,
    guests: str,
    box: Sandbox | None,
) -> int:
    argv = [sys.executable, "-m", "reclaimnet.apps.cli", "--state", str(config.state), "agent"]
    argv += ["--join", url, "--name", node, "--notice", f"{notice / SECOND}s"]
    argv += ["--vault-quota", str(vault_quota)]
    argv += ["--gpus", str(gpus)] if gpus is not None else []
    argv += ["--lend"] if lend else []
    argv += ["--suite", suite]
    argv += ["--guard", str(guard)] if guard is not None else []
    argv += ["--address", address] if address is not None else []
    argv += ["--uplink", uplink] if uplink is not None else []
    argv += ["--grace", f"{grace / SECOND}s"] if grace is not None else []
    argv += ["--zone", zone] if zone is not None else []
    argv += ["--topology", str(topology.resolve())] if topology is not None else []
    argv += ["--sandbox", guests]
    if box is not None:
        argv += ["--guest-disk", str(box.disk_bytes)]
        argv += [word for network in box.campus for word in ("--campus-net", str(network))]
        argv += [word for share in box.shares for word in ("--share", str(share))]
    env = {**os.environ, "RECLAIMNET_NATS__TOKEN": token}
    sock = folder / "control.sock"
    sock.unlink(missing_ok=True)
    with waiting("the agent joins the campus"):
        pid = daemon.spawn(
            argv,
            log=folder / "agent.log",
            ready=lambda: _answers(config, node),
            patience_s=READY_S,
            env=env,
        )
    sys.stderr.write(f"The agent for {node} runs (pid {pid}); `rn down` ends it.\n")
    return 0


def _answers(config: Config, node: NodeId) -> bool:
    try:
        return ask_local(config, node, StatusRequest()).ok
    except ReclaimNetError:
        return False
