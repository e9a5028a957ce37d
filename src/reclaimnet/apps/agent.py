"""The agent: speaks for one node. It puts the mind into the live world and listens to its owner."""

import asyncio
import contextlib
import dataclasses
import getpass
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from reclaimnet import wire
from reclaimnet.adapters.linux import criu, sandbox
from reclaimnet.adapters.linux.attempts.reports import Found
from reclaimnet.adapters.linux.sandbox import Sandbox
from reclaimnet.adapters.nats.campus import Campus
from reclaimnet.adapters.tls import ca
from reclaimnet.adapters.vault.serving import ChunkServer
from reclaimnet.adapters.vault.store import Vault
from reclaimnet.apps import daemon
from reclaimnet.apps.config import DEFAULT_VAULT_QUOTA
from reclaimnet.apps.guard_client import DEFAULT_SOCKET
from reclaimnet.apps.guarded import Guarded
from reclaimnet.apps.live.clock import Clock
from reclaimnet.apps.live.ears import Ears
from reclaimnet.apps.live.logs import STORED_PATIENCE_S
from reclaimnet.apps.live.serving import Serving
from reclaimnet.apps.live.world import LiveWorld
from reclaimnet.apps.membership import joined
from reclaimnet.apps.owners_door import open_door
from reclaimnet.apps.owners_word import FILE, NEVER, OwnersWord, has_lent
from reclaimnet.engine.body import Body
from reclaimnet.engine.neighbourhood import LIVELY, Timing
from reclaimnet.engine.node import Node
from reclaimnet.errors import (
    ReclaimNetError,
    Unavailable,
    UsageError,
)
from reclaimnet.model import events as ev
from reclaimnet.model.asking import (
    LendRequest,
    Reply,
    Request,
    StatusRequest,
)
from reclaimnet.model.market import Address, Cause, Gpu, JobId, NodeId, Progress
from reclaimnet.model.units import SECOND, show_duration
from reclaimnet.model.work import Saving, caught_up
from reclaimnet.policy.suite import SUITES
from reclaimnet.policy.topology import Topology

ASSUMED_UPLINK: Final = 125_000_000
"""Bytes a second: a gigabit, until somebody says or transfers show what it is."""
LEAVE_AT_MOST: Final = 20 * SECOND
"""How long Ctrl-C and `rn down` wait for guests to be saved and to leave."""
SAFETY: Final = SECOND
"""Before a batch system's own deadline: it kills without asking."""
PART_S: Final = 2.0
END_S: Final = STORED_PATIENCE_S + 3.0
"""Their last words come before their ends."""
CLOSE_S: Final = 10.0
"""What an agent needs to close, and more."""

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
                await end_task(living, ask_again_s=CLOSE_S)
        except BaseExceptionGroup as error:
            cause = _cause(error)
            if not isinstance(cause, ReclaimNetError):
                _log.exception("the agent is broken")
            raise cause from error
    return 0


async def end_task(task: "asyncio.Task[None]", *, ask_again_s: float) -> None:
    """Until it has ended, since one word is not always enough: the client of NATS swallows a
    cancellation that comes while it sends."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=ask_again_s)


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
        self._word = OwnersWord(
            node=settings.node,
            gpus=settings.gpus,
            file=settings.folder / FILE,
            clock=self._clock,
        )
        self._parting = False
        self._guests_known = asyncio.Event()
        """Before that, a reclaim would find nobody who has to leave."""

    # --- living ----------------------------------------------------------------------------

    async def live(self) -> None:
        settings = self.settings
        async with contextlib.AsyncExitStack() as stack:
            # The owner's door opens first: while the campus is away, it says so.
            door = open_door(settings.folder / "control.sock", self.answer)
            await stack.enter_async_context(door)
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
            if guard is not None:
                stack.callback(guard.close)
            gate = _Gate(awake=self._guests_known.is_set)
            server = stack.enter_context(
                ChunkServer(
                    vault,
                    ca.server_context(credentials),
                    host=settings.host,
                    may_read=gate.may_read,
                    objection=gate.objection,
                    listener=guard.listen() if guard is not None else None,
                )
            )
            body = await _body(settings, server.address, room=vault.room(), guard=guard)
            told = await _told_last(campus, settings.node)
            mind = Node(body, SUITES[settings.suite])
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
            await self._wake_up(campus, vault, told)
            await self._serve(campus)

    async def _wake_up(self, campus: Campus, vault: Vault, told: Sequence[Progress]) -> None:
        world, _ = self._running()
        await take_up(
            self.settings.node,
            world=world,
            word=self._word,
            clock=self._clock,
            campus=campus,
            vault=vault,
            told=told,
        )
        self._guests_known.set()
        if self.settings.lend is not None and self._word.said_at == NEVER:
            # A machine that its owner took back stays so, however often we are started.
            await self.answer(self.settings.lend)
        world.deliver(ev.Woke())

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
        ears = Ears(mind, campus, deliver=world.deliver, hear=world.hear)
        await ears.listen(mind.roles())

    # --- the owner -------------------------------------------------------------------------

    async def answer(self, request: Request) -> Reply:
        """What a person asked, locally or through the gateway."""
        world, mind = self._running()
        if isinstance(request, StatusRequest):
            return Reply(ok=True, text=wire.encode_card(mind.card()).decode())
        await self._guests_known.wait()
        word, provider = self._word, mind.provider
        asked, before = word.asked(request, provider), word.said_at
        # Before it is carried out: both are written down together.
        word.said_at = self._clock.now()
        answer = await world.ask(asked)
        if not answer.ok:
            word.said_at = before
            word.keep(provider)
            return Reply(ok=False, text=answer.text)
        text = answer.text
        if isinstance(asked, ev.LendAsked):
            text += f" {word.repeated(asked.offer)}"
        if word.unwritten:
            text += (
                f" (It cannot be written down: {word.unwritten}; mend that before the agent "
                "is restarted, or say it again then.)"
            )
        return Reply(ok=True, text=text, said_at=word.said_at)

    # --- the end ---------------------------------------------------------------------------

    async def leave(self, grace: int | None) -> None:
        """In peace: guests are saved and gone before we are. With a grace they run on for as long
        as it allows, since the machine goes then; without one, nobody waits but for us."""
        if self._world is None:
            return
        world, mind = self._running()
        mind.provider.closed = True
        guests = mind.guests.processes()
        if not guests or mind.provider.offer is None:
            return
        asked = ev.ReclaimAsked(
            request=self._word.mint(),
            grace=LEAVE_AT_MOST if grace is None else grace,
            cause=Cause.STOP if grace is None else Cause.RECLAIM,
            reason="the agent is stopping",
        )
        _log.info(
            "%d jobs have %s to leave; press Ctrl-C again to end them at once",
            len(guests),
            show_duration(asked.grace or 0),
        )
        if asked.cause is Cause.RECLAIM:
            self._word.part(mind.provider)
        await world.ask(asked)
        await world.empty()
        # The notice is over with the last guest; the next agent is not to find it running.
        world.deliver(ev.Woke())

    async def leave_allocation(self, allocation: Allocation, told: signal.Signals) -> None:
        if self._world is None:
            return
        world, mind = self._running()
        if mind.provider.offer is not None:
            asked = ev.ReclaimAsked(
                request=self._word.mint(),
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
        # What one guest leaves vacant is not for the next who waits.
        mind.provider.closed = True
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


async def _told_last(campus: Campus, me: NodeId) -> Sequence[Progress]:
    """How far the jobs of the agent before us had come by its last beat, until our first one takes
    its place; nothing if the store does not say."""
    with contextlib.suppress(Unavailable):
        card = await campus.read_card(me)
        return card.jobs if card is not None else ()
    return ()


async def take_up(
    me: NodeId,
    *,
    world: LiveWorld,
    word: OwnersWord,
    clock: Clock,
    campus: Campus,
    vault: Vault,
    told: Sequence[Progress] = (),
) -> None:
    """What the agent before us left: the owner's word, and its guests, which had come as far as it
    `told` last."""
    theirs = await campus.records.find(
        lambda r: me in (r.holder, *r.seats) or bool(vault.manifests(r.id))
    )
    records = {record.id: caught_up(record, told) for record in theirs}

    def tell(found: Sequence[Found]) -> None:
        # In one go: GPUs under notice whose guests are not known yet would be the owner's at once,
        # and nobody would ask those guests to leave. Nothing is written down before it is read.
        said = word.kept()
        world.after_owner_event = lambda: word.keep(world.mind.provider)
        for event in said:
            world.deliver(event)
        for attempt in found:
            held = attempt.suspended_at
            since = None if held is None else clock.wall(held)
            record = records[attempt.job]
            world.deliver(ev.ProcessFound(record=record, gpus=attempt.gpus, suspended_at=since))
            if attempt.exit is not None:
                world.processes.exited(attempt.exit)
            elif attempt.waiting:
                world.runner.resume(attempt.job, attempt.epoch)

    await world.adopt(records.values(), tell)
    kept = tuple(sorted({record_id for record_id in records if vault.manifests(record_id)}))
    world.deliver(ev.CopiesFound(jobs=kept))
    for record in records.values():
        known = world.mind.guests.holder(record.id) is not None
        if record.holder == me and not known:
            world.deliver(ev.RecordSeen(job=record.id, record=record))


def _guard(settings: Settings) -> Guarded | None:
    """The one that was named must be there; the usual one is used if it is."""
    path = settings.guard or DEFAULT_SOCKET
    if settings.guard is None and not path.exists():
        return None
    try:
        guard = Guarded(path)
    except Unavailable:
        if settings.guard is not None:
            raise
        return None
    box = settings.sandbox
    if box is not None and box.network is sandbox.Network.CAMPUS:
        guard.close()
        raise UsageError(
            "guests that a guard houses are not in our own control group, which is what "
            "keeps packets on the campus: choose --sandbox none or open beside a guard"
        )
    return guard


async def _body(settings: Settings, address: Address, *, room: int, guard: Guarded | None) -> Body:
    obstacle = await asyncio.to_thread(criu.obstacle)
    if settings.sandbox is not None:
        obstacle = "guests are in a sandbox here, and CRIU cannot save one"
    return Body(
        node=settings.node,
        provider=getpass.getuser(),
        zone=settings.zone,
        address=address,
        uplink_bps=settings.uplink_bps or ASSUMED_UPLINK,
        uplink_assumed=settings.uplink_bps is None,
        shelf_bytes=room,
        timing=settings.timing,
        topology=settings.topology,
        has_lent=has_lent(settings.folder / FILE),
        holds_slots=guard is not None and guard.holds_slots(),
        abilities=() if obstacle else (str(Saving.CRIU),),
        obstacles=(f"{Saving.CRIU}: {obstacle}",) if obstacle else (),
    )


class _Gate:
    """Lets the chunk server start before there is a world to ask."""

    def __init__(self, *, awake: Callable[[], bool]) -> None:
        self._awake = awake
        self.serving: Serving | None = None
        self.serves: Callable[[], bool] = lambda: False

    def may_read(self, common_name: str, job: JobId) -> bool:
        return self.serving is not None and self.serving.may_read(common_name, job)

    def objection(self, common_name: str) -> str:
        """No other node is served after the owner's deadline: the uplink is its owner's. The
        gateway may still fetch what a job has left, for the user who asks for it."""
        if self.serves() or (common_name == ca.GATEWAY and self.serving is not None):
            return ""
        return "its owner's deadline has passed" if self._awake() else "its agent is just starting"
