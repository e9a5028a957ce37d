"""The keeper of a chain on a real Slurm. It delivers what squeue shows and carries out what the
engine orders; everything it must not forget is on disk before it is done."""

import getpass
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, assert_never

from reclaimnet.adapters.slurm.client import Slurm, SubmitFailed
from reclaimnet.adapters.slurm.words import Refusal, Row, hopeless, in_words
from reclaimnet.apps import chain_job, daemon
from reclaimnet.apps.chain_job import EXIT_GO_ON
from reclaimnet.apps.chain_kept import ASKED, keep_state, kept_state, kept_wish
from reclaimnet.apps.chain_wish import BUSY, policy_of
from reclaimnet.apps.notes import write_down
from reclaimnet.engine.chain import Chain
from reclaimnet.errors import NotFound, Unavailable
from reclaimnet.model.chain import (
    AskToSave,
    ChainEvent,
    ChainOrder,
    EndJobs,
    LinkState,
    Look,
    Looked,
    LookFailed,
    OpenGate,
    Phase,
    Queue,
    Say,
    SeenLink,
    Submit,
    SubmitRefused,
    Submitted,
    Woke,
)
from reclaimnet.model.supply import EndedJob, RunningJob, WaitingJob
from reclaimnet.model.units import MINUTE, SECOND

POLL_S: Final = 0.25
"""How often a keeper looks into its own folder, whether a person asked for the end."""
_WAITS_FOR_OTHERS: Final = ("JobHeld", "Dependency", "BeginTime", "DependencyNeverSatisfied")
_LOST: Final = ("NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "REVOKED")

Tell = Callable[[str], None]


class Keeper:
    """Who watches one chain. Another one can take over at any moment."""

    def __init__(self, folder: Path, slurm: Slurm, tell: Tell) -> None:
        wish = kept_wish(folder)
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
            wish.spec, policy_of(wish), kept_state(folder, wish.spec.name), user=self._user
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
                keep_state(self._folder, self.mind.state)
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
                write_down(self._sign(order.number, "go"), "")
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
                write_down(self._sign(order.number, "leave"), "")
                self._slurm.signal(order.id, "USR1")
        except Unavailable:
            self._undone.append(order)
        self._not_before = time.time_ns()

    def _submit(self, number: int) -> ChainEvent:
        wish = self._wish
        path = self._folder / "links" / f"{number}.sh"
        for name in ("arrived", "went", "go", "leave", "ready", "over"):
            self._sign(number, name).unlink(missing_ok=True)
        write_down(path, chain_job.script(wish.order, number))
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
        if row.state in BUSY:
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
            if row.state not in ("PENDING", *BUSY) and row.start is not None and row.end is not None
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
                if r.state in BUSY and r.start is not None
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


def _made_at(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
