"""Behind `rn chain run`: a chain on a real Slurm. It delivers what squeue shows and carries out
what the engine orders; everything it must not forget is on disk before it is done."""

import getpass
import json
import os
import re
import secrets
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final, assert_never

import msgspec

from reclaimnet.adapters.slurm.client import Slurm, SubmitFailed
from reclaimnet.adapters.slurm.words import PartitionRow, Refusal, Row, hopeless, in_words
from reclaimnet.apps import chain_job, chain_policies, daemon
from reclaimnet.apps.chain_job import EXIT_GO_ON
from reclaimnet.apps.chain_told import ChainTold, Teller, told_of
from reclaimnet.apps.config import Config, did_you_mean
from reclaimnet.apps.own_command import rn
from reclaimnet.engine.chain import Chain, tally_of
from reclaimnet.errors import BadConfig, NotFound, Unavailable, UsageError
from reclaimnet.model.chain import (
    AskToSave,
    CancelAsked,
    ChainEvent,
    ChainOrder,
    ChainSpec,
    ChainState,
    EndJobs,
    Handover,
    LinkState,
    Look,
    Looked,
    LookFailed,
    NextAsked,
    OpenGate,
    Phase,
    Queue,
    Say,
    SeenLink,
    Submit,
    SubmitRefused,
    Submitted,
    Tempo,
    Woke,
)
from reclaimnet.model.supply import EndedJob, Promise, RunningJob, WaitingJob
from reclaimnet.model.units import MINUTE, SECOND, show_duration
from reclaimnet.policy.provision import FAIR_PRICE

POLL_S: Final = 0.25
"""How often a keeper looks into its own folder, whether a person asked for the end."""
READY_S: Final = 30.0
CANCEL_PATIENCE_S: Final = 120.0
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}")
_WAITS_FOR_OTHERS: Final = ("JobHeld", "Dependency", "BeginTime", "DependencyNeverSatisfied")
_BUSY: Final = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING")
_LOST: Final = ("NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "REVOKED")

ASKED: Final[dict[str, ChainEvent]] = {"cancel": CancelAsked(), "next": NextAsked()}
"""What people ask of a keeper, each by a file in the chain's folder."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the person asked for: kept on disk, so that any later keeper does the same."""

    id: str
    """Tells this life of the chain from an earlier one of the same name."""
    spec: ChainSpec
    order: chain_job.Order
    partition: str | None = None
    options: tuple[str, ...] = ()
    """For sbatch, as the person gave them."""
    policy: str = "plan"
    gap_price: float = FAIR_PRICE
    lead_h: float = 6.0
    weights: str | None = None
    promise: Promise | None = None
    begun: int = field(default_factory=time.time_ns)

    @property
    def comment(self) -> str:
        return f"rn-chain {self.spec.name}/{self.id}"


# --- what people ask for --------------------------------------------------------------------


def run(*, config: Config, name: str | None, detach: bool, tell: Tell, **wish: Any) -> int:
    """Begin a chain, or take up one that was left; returns when it is over."""
    folder = begin(config=config, name=name, tell=tell, **wish)
    if detach:
        return _detached(config, folder, tell)
    return _kept(config, folder, tell)


def _kept(config: Config, folder: Path, tell: Tell) -> int:
    def told() -> ChainTold:
        now = time.time_ns()
        return told_of(_report(folder, now), user=getpass.getuser(), now=now)

    with Teller(config, folder.name, told):
        return Keeper(folder, _slurm(config), tell).live()


def begin(
    *,
    config: Config,
    command: Sequence[str],
    name: str | None = None,
    limit: int | None = None,
    nodes: int | None = None,
    partition: str | None = None,
    options: Sequence[str] = (),
    handover: str = "service",
    ready_port: int | None = None,
    ready_command: str | None = None,
    ready_file: bool = False,
    save_signal: str = "USR1",
    policy: str | None = None,
    gap_price: float = FAIR_PRICE,
    lead_h: float = 6.0,
    weights: Path | None = None,
    promise: Promise | None = None,
    tempo: Tempo | None = None,
    tell: Tell = lambda text: None,
) -> Path:
    """Write down what is wanted, unless a chain of this name was left unfinished: then that goes
    on. Whoever keeps the folder next submits the first job."""
    name = name or _name_of(command)
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be a chain's name; use letters, digits and dashes")
    folder = config.state / "chains" / name
    slurm = _slurm(config)
    keeper = daemon.running(folder / "keeper.pid")
    if keeper is not None:
        raise UsageError(
            f"the chain {name} is being kept already (pid {keeper.pid}); see `rn chain status`"
        )
    if _kept_wish(folder) is not None and not _kept_state(folder, name).phase.over:
        if command:
            tell(f"the chain {name} goes on as it was begun; `rn chain cancel {name}` would end it")
        return folder
    if not command:
        raise UsageError(f"there is no chain {name} to go on with; give its command after --")
    wish = _wish(
        folder,
        command,
        name=name,
        limit=limit,
        nodes=nodes,
        partition=partition,
        options=options,
        handover=Handover(handover),
        ready_port=ready_port,
        ready_command=ready_command,
        ready_file=ready_file,
        save_signal=save_signal,
        policy=policy or ("plan" if weights is None else "forest"),
        gap_price=gap_price,
        lead_h=lead_h,
        weights=weights,
        promise=promise,
        tempo=tempo or Tempo(),
    )
    _policy(wish)
    _begin(folder, _adopted(_checked(wish, slurm), slurm, tell))
    return folder


def status(*, config: Config, name: str | None = None) -> list[dict[str, Any]]:
    """Every chain, or one: what runs, gap and overlap so far, when the next job is expected."""
    home = config.state / "chains"
    if name is not None and not (home / name / "wish.json").exists():
        known = [path.parent.name for path in sorted(home.glob("*/wish.json"))]
        raise NotFound(f"there is no chain {name}{did_you_mean(name, known)}")
    folders = [home / name] if name else sorted(p.parent for p in home.glob("*/wish.json"))
    return [_report(folder, time.time_ns()) for folder in folders]


def cancel(*, config: Config, name: str, tell: Tell = lambda text: None) -> None:
    """End every job of the chain, whoever keeps it; returns when none is left."""
    [before] = status(config=config, name=name)
    if Phase(before["phase"]).over:
        raise UsageError(f"the chain {name} is over already: {before['phase']}")
    folder = config.state / "chains" / name
    (folder / "cancel").touch()
    until = time.monotonic() + CANCEL_PATIENCE_S
    while daemon.running(folder / "keeper.pid") is not None:
        if time.monotonic() > until:
            raise Unavailable(f"the keeper of {name} does not answer; its log is {folder}/log")
        time.sleep(POLL_S)
    if not _kept_state(folder, name).phase.over:
        _kept(config, folder, tell)


def advance(*, config: Config, name: str) -> None:
    """Have the next job submitted now, whatever the policy thinks: its keeper does it."""
    [before] = status(config=config, name=name)
    if Phase(before["phase"]).over:
        raise UsageError(f"the chain {name} is over already: {before['phase']}")
    if before["keeper"] is None:
        raise Unavailable(f"nobody keeps the chain {name}; begin with `rn chain run --name {name}`")
    (config.state / "chains" / name / "next").touch()


def _report(folder: Path, now: int) -> dict[str, Any]:
    wish = _kept_wish(folder)
    if wish is None:
        raise BadConfig(f"{folder}/wish.json cannot be read; end the chain's jobs with scancel")
    state = _kept_state(folder, folder.name)
    tally = tally_of(state, wish.spec.handover, now)
    keeper = daemon.running(folder / "keeper.pid")
    live = [link for link in state.links if not link.state.over]
    current = next((link for link in reversed(live) if link.state is LinkState.RUNNING), None)
    waiting = next((link for link in live if link.state is LinkState.PENDING), None)
    outlook = state.outlook
    return {
        "name": folder.name,
        "phase": str(state.phase),
        "up": tally.up,
        "keeper": keeper.pid if keeper is not None else None,
        "policy": wish.policy,
        "gap_price": wish.gap_price,
        "handover": str(wish.spec.handover),
        "jobs": state.count,
        "current": None if current is None else current.id,
        "ends_in_s": _ahead(None if current is None else current.ends_at, now),
        "successor": None if waiting is None else waiting.id,
        "successor_waits": None if waiting is None else waiting.reason,
        "next_start": None
        if outlook is None
        else {
            "in_s": _ahead(outlook.at, now),
            "low_s": _ahead(outlook.low, now),
            "high_s": _ahead(outlook.high, now),
            "why": outlook.why,
        },
        "gap_s": round(tally.gap / SECOND, 1),
        "overlap_s": round(tally.overlap / SECOND, 1),
        "silent_s": None
        if state.silent_since is None
        else round((now - state.silent_since) / SECOND, 1),
        "words": state.words,
        "links": msgspec.to_builtins(state.links),
    }


def _ahead(at: int | None, now: int) -> float | None:
    return None if at is None else round(max(at - now, 0) / SECOND, 1)


# --- before it begins -----------------------------------------------------------------------


def _name_of(command: Sequence[str]) -> str:
    if not command:
        raise UsageError("what is to be run? Write it after --, as in `rn chain run -- ./serve.sh`")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(command[0]).stem).strip("-.") or "chain"


def _wish(
    folder: Path,
    command: Sequence[str],
    *,
    name: str,
    limit: int | None,
    nodes: int | None,
    partition: str | None,
    options: Sequence[str],
    handover: Handover,
    ready_port: int | None,
    ready_command: str | None,
    ready_file: bool,
    save_signal: str,
    policy: str,
    gap_price: float,
    lead_h: float,
    weights: Path | None,
    promise: Promise | None,
    tempo: Tempo,
) -> Wish:
    asked = chain_job.Asked()
    words = list(command)
    if len(words) == 1 and Path(words[0]).is_file():
        asked = chain_job.read_script(Path(words[0]))
    if Path(words[0]).is_file():
        path = Path(words[0]).absolute()
        # As sbatch would: a script need not be executable.
        words[0:1] = [str(path)] if os.access(path, os.X_OK) else ["bash", str(path)]
    elif shutil.which(words[0]) is None:
        raise UsageError(f"there is no {words[0]} here or on PATH; name a script or a program")
    length = limit if limit is not None else asked.limit
    if length is None:
        raise UsageError("how long may one job run? Say so with --limit, for example --limit 48h")
    if length < MINUTE:
        raise UsageError("a limit is at least a minute: Slurm counts in minutes")
    if sum((ready_port is not None, ready_command is not None, ready_file)) > 1:
        raise UsageError("--ready-port, --ready-cmd and --ready-file exclude each other")
    return Wish(
        id=secrets.token_hex(3),
        spec=ChainSpec(
            name=name,
            nodes=nodes or asked.nodes or 1,
            limit=length,
            handover=handover,
            tempo=tempo,
        ),
        order=chain_job.Order(
            name=name,
            folder=str(folder),
            workdir=str(Path.cwd()),
            command=tuple(words),
            directives=asked.directives,
            handover=handover,
            ready_port=ready_port,
            ready_command=ready_command,
            ready_file=ready_file,
            save_signal=save_signal,
        ),
        partition=partition or asked.partition,
        options=tuple(options),
        policy=policy,
        gap_price=gap_price,
        lead_h=lead_h,
        weights=None if weights is None else str(weights.absolute()),
        promise=promise,
    )


def _checked(wish: Wish, slurm: Slurm) -> Wish:
    """What Slurm would let wait for ever is refused before it is asked."""
    found = slurm.partitions()
    default = next((name for name, partition in found.items() if partition.default), None)
    asked = wish.partition or default
    if asked is None:
        raise UsageError(
            f"this cluster has no default partition; name one with --partition"
            f"{did_you_mean('', sorted(found))}"
        )
    for name in asked.split(","):
        partition = found.get(name)
        if partition is None:
            raise UsageError(f"there is no partition {name}{did_you_mean(name, sorted(found))}")
        _fits(wish, partition)
    return replace(wish, partition=asked)


def _fits(wish: Wish, partition: PartitionRow) -> None:
    if wish.spec.limit > partition.max_limit:
        raise UsageError(
            f"a limit of {show_duration(wish.spec.limit)} is too long for {partition.name}, which "
            f"allows {show_duration(partition.max_limit)}; ask for less with --limit"
        )
    if wish.spec.nodes > partition.nodes:
        raise UsageError(
            f"{partition.name} has {partition.nodes} nodes, not {wish.spec.nodes}; "
            "ask for fewer with --nodes"
        )


def _adopted(wish: Wish, slurm: Slurm, tell: Tell) -> Wish:
    """Jobs of a chain of this name whose keeper and folder are gone are taken up."""
    pattern = re.compile(rf"rn-chain {re.escape(wish.spec.name)}/([0-9a-f]+) \d+")
    for row in slurm.jobs_of(getpass.getuser()):
        found = pattern.fullmatch(row.comment)
        if found is not None and row.state in ("PENDING", *_BUSY):
            tell(f"job {row.id} of an earlier {wish.spec.name} is in the queue; it is taken up")
            return replace(wish, id=found[1])
    return wish


def _begin(folder: Path, wish: Wish) -> None:
    """Nothing of an earlier life must look like a sign of this one, but for the saved state."""
    for name in ("links", "logs"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True, mode=0o700)
    (folder / "state").mkdir(exist_ok=True)
    for name in ("state.json", *ASKED):
        (folder / name).unlink(missing_ok=True)
    _write(folder / "wish.json", msgspec.json.encode(wish))


def _detached(config: Config, folder: Path, tell: Tell) -> int:
    name = folder.name
    pid = daemon.spawn(
        rn("--state", str(config.state), "chain", "run", "--name", name),
        log=folder / "log",
        ready=(folder / "keeper.pid").exists,
        patience_s=READY_S,
    )
    tell(f"the chain {name} is kept in the background (pid {pid}); see `rn chain status {name}`")
    return 0


# --- the keeper -----------------------------------------------------------------------------


class Keeper:
    """Who watches one chain. Another one can take over at any moment."""

    def __init__(self, folder: Path, slurm: Slurm, tell: Tell) -> None:
        wish = _kept_wish(folder)
        if wish is None:
            raise NotFound(f"there is no chain in {folder}; begin one with `rn chain run`")
        self._wish = wish
        self._folder = folder
        self._slurm = slurm
        self._tell = tell
        self._user = getpass.getuser()
        self._not_before = 0
        """Older answers of Slurm's do not know yet what we have done since."""
        self._undone: list[AskToSave | EndJobs] = []
        self._stopped = threading.Event()
        self.mind = Chain(
            wish.spec, _policy(wish), _kept_state(folder, wish.spec.name), user=self._user
        )

    def live(self) -> int:
        """Until the chain is over (0, or 1 if it was given up), or until we are interrupted."""
        with daemon.the_only_one(self._folder / "keeper.pid", f"a keeper of {self._folder.name}"):
            before = {
                number: signal.signal(number, self._interrupted)
                for number in (signal.SIGINT, signal.SIGTERM)
                if threading.current_thread() is threading.main_thread()
            }
            try:
                return self._live()
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._stopped.set()

    def _live(self) -> int:
        events: deque[ChainEvent] = deque([Woke()])
        while not self.mind.state.phase.over:
            events.extend(wish for name, wish in ASKED.items() if (self._folder / name).exists())
            while events:
                event = events.popleft()
                orders = self.mind.handle(event, time.time_ns())
                self._remember()
                for name, wish in ASKED.items():
                    if event == wish:
                        # Not before it is remembered: a person's word must not get lost.
                        (self._folder / name).unlink(missing_ok=True)
                for order in orders:
                    events.extend(self._carry_out(order))
            if self._stopped.is_set():
                self._tell(
                    f"left; the jobs of {self._folder.name} go on, but none is submitted until "
                    f"`rn chain run --name {self._folder.name}` takes it up again"
                )
                return 128 + signal.SIGINT
            wake = self.mind.next_wake()
            if wake is not None and wake <= time.time_ns():
                events.append(Woke())
            elif wake is not None:
                self._stopped.wait(min(POLL_S, (wake - time.time_ns()) / SECOND))
        return 0 if self.mind.state.phase is not Phase.STOPPED else 1

    def _remember(self) -> None:
        _write(self._folder / "state.json", msgspec.json.encode(self.mind.state))

    # --- orders -----------------------------------------------------------------------------

    def _carry_out(self, order: ChainOrder) -> list[ChainEvent]:
        match order:
            case Say():
                self._tell(order.text)
            case Look():
                return [self._look(order)]
            case Submit():
                return [self._submit(order.number)]
            case OpenGate():
                _write(self._sign(order.number, "go"), b"")
            case AskToSave() | EndJobs():
                self._act(order)
            case _:
                assert_never(order)
        return []

    def _act(self, order: AskToSave | EndJobs) -> None:
        """What Slurm did not hear is said again once it answers."""
        try:
            if isinstance(order, EndJobs):
                self._slurm.cancel(order.ids)
            else:
                _write(self._sign(order.number, "leave"), b"")
                self._slurm.signal(order.id, "USR1")
        except Unavailable:
            self._undone.append(order)
        self._not_before = time.time_ns()

    def _submit(self, number: int) -> ChainEvent:
        wish = self._wish
        path = self._folder / "links" / f"{number}.sh"
        for name in ("arrived", "went", "go", "leave", "ready", "over"):
            self._sign(number, name).unlink(missing_ok=True)
        _write(path, chain_job.script(wish.order, number).encode())
        options = [
            f"--job-name={wish.spec.name}",
            f"--comment={wish.comment} {number}",
            f"--time={-(-wish.spec.limit // MINUTE)}",
            f"--nodes={wish.spec.nodes}",
            # A job that is lost is replaced by the next one, which does not wait out a hold.
            "--no-requeue",
            f"--partition={wish.partition}",
            *wish.options,
        ]
        try:
            id = self._slurm.submit(path, *options)
        except SubmitFailed as error:
            return SubmitRefused(
                number=number,
                why=str(error),
                full=error.kind is Refusal.FULL,
                doubtful=error.kind is Refusal.SILENT,
            )
        finally:
            self._not_before = time.time_ns()
        return Submitted(number=number, id=id)

    def _look(self, asked: Look) -> ChainEvent:
        try:
            undone, self._undone = self._undone, []
            for order in undone:
                self._act(order)
            if asked.whole_queue:
                rows = self._slurm.all_jobs(not_before=self._not_before)
            else:
                rows = self._slurm.jobs_of(self._user, not_before=self._not_before)
            own = [row for row in rows if row.comment.startswith(f"{self._wish.comment} ")]
            shown = {row.id for row in own}
            missing = [
                link.id
                for link in self.mind.state.links
                if not link.state.over and link.id not in shown
            ]
            if missing:
                own += self._forgotten(missing)
            queue = self._queue(rows) if asked.whole_queue else None
        except Unavailable as error:
            return LookFailed(why=str(error))
        seen = {link.number: link for link in map(self._seen, own) if link is not None}
        return Looked(links=tuple(seen[number] for number in sorted(seen)), queue=queue)

    def _forgotten(self, ids: Sequence[str]) -> list[Row]:
        return [
            row
            for row in self._slurm.remembered(ids)
            if row.comment.startswith(f"{self._wish.comment} ")
        ]

    def _seen(self, row: Row) -> SeenLink | None:
        number = row.comment.rpartition(" ")[2]
        if not number.isdigit():
            return None
        state = self._state(row, int(number))
        pending = state is LinkState.PENDING
        return SeenLink(
            number=int(number),
            id=row.id,
            state=state,
            submitted=row.submitted,
            limit=row.limit,
            started=None if pending else row.start,
            ends_at=row.end if state is LinkState.RUNNING else None,
            ended=row.end if state.over else None,
            ready=_made_at(self._sign(int(number), "ready")),
            arrived=state is LinkState.RUNNING
            and self._sign(int(number), "arrived").exists()
            and not self._sign(int(number), "went").exists(),
            expected=row.start if pending else None,
            reason=in_words(row.reason) if pending else f"{row.state} {row.reason}".strip(),
            hopeless=pending and hopeless(row.reason),
        )

    def _state(self, row: Row, number: int) -> LinkState:
        if row.state == "PENDING" or row.state.startswith(("REQUEUE", "SPECIAL")):
            return LinkState.PENDING
        if row.state in _BUSY:
            return LinkState.RUNNING
        if self._exit_code(row, number) == EXIT_GO_ON or row.state in ("TIMEOUT", "DEADLINE"):
            return LinkState.TO_GO_ON
        if row.state == "COMPLETED":
            return LinkState.DONE
        if row.state == "CANCELLED":
            return LinkState.CANCELLED
        return LinkState.LOST if row.state in _LOST else LinkState.FAILED

    def _exit_code(self, row: Row, number: int) -> int | None:
        """squeue does not tell it; the job's own script does."""
        if row.exit_code is not None:
            return row.exit_code
        try:
            return int(self._sign(number, "over").read_text())
        except (OSError, ValueError):
            return None

    def _queue(self, rows: list[Row]) -> Queue:
        partitions = self._slurm.partitions()
        names = (self._wish.partition or "").split(",")
        ours = [partitions[name] for name in names if name in partitions]
        others = [
            row
            for row in rows
            if not row.comment.startswith(f"{self._wish.comment} ")
            and set(row.partition.split(",")) & set(names)
        ]
        waiting = [
            row
            for row in others
            if row.state == "PENDING" and not row.reason.startswith(_WAITS_FOR_OTHERS)
        ]
        waiting.sort(key=lambda row: (-row.priority, row.submitted, row.id))
        over = {
            row.id: row
            for row in (*self._slurm.ended_lately(), *others)
            if row.state not in ("PENDING", *_BUSY)
            and row.start is not None
            and row.end is not None
        }
        return Queue(
            total_nodes=max((p.in_service for p in ours), default=0),
            free_nodes=max((p.idle for p in ours), default=0),
            waiting=tuple(
                WaitingJob(user=r.user, nodes=r.nodes, limit=r.limit, submitted=r.submitted)
                for r in waiting
            ),
            running=tuple(
                RunningJob(
                    user=r.user,
                    nodes=r.nodes,
                    limit=r.limit,
                    submitted=r.submitted,
                    started=r.start,
                )
                for r in others
                if r.state in _BUSY and r.start is not None
            ),
            ended=tuple(
                EndedJob(
                    user=r.user,
                    nodes=r.nodes,
                    limit=r.limit,
                    submitted=r.submitted,
                    started=r.start,
                    ended=r.end,
                )
                for r in sorted(over.values(), key=lambda r: (r.end or 0, r.id))
                if r.start is not None and r.end is not None
            ),
        )

    def _sign(self, number: int, name: str) -> Path:
        return self._folder / "links" / f"{number}.{name}"


# --- shared ---------------------------------------------------------------------------------


def _slurm(config: Config) -> Slurm:
    """All chains of this state share one folder of answers, so that Slurm is asked once."""
    return Slurm(config.state / "chains" / ".slurm")


def _policy(wish: Wish) -> Any:
    return chain_policies.build(
        wish.policy,
        lead_h=wish.lead_h,
        gap_price=wish.gap_price,
        promise=wish.promise,
        weights=None if wish.weights is None else Path(wish.weights),
    )


def _kept_wish(folder: Path) -> Wish | None:
    try:
        return msgspec.json.decode((folder / "wish.json").read_bytes(), type=Wish)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise BadConfig(f"{folder}/wish.json cannot be read ({error})") from error


def _kept_state(folder: Path, name: str) -> ChainState:
    """Without one, or with a damaged one, the queue itself tells: jobs are known by comment."""
    try:
        return msgspec.json.decode((folder / "state.json").read_bytes(), type=ChainState)
    except (OSError, msgspec.DecodeError, json.JSONDecodeError):
        return ChainState(name=name)


def _made_at(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _write(path: Path, data: bytes) -> None:
    """All or nothing, also through a crash."""
    draft = path.with_name(f".{path.name}.new")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
