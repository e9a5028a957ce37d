"""Slurm through its own commands: few calls, each with a timeout, shared by all who watch."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from reclaimnet.adapters.slurm.words import (
    SACCT_FIELDS,
    SEPARATOR,
    SINFO_FIELDS,
    SQUEUE_FIELDS,
    PartitionRow,
    Refusal,
    Row,
    explained,
    parse_sacct,
    parse_sinfo,
    parse_squeue,
    refusal,
)
from reclaimnet.errors import ReclaimNetError, Unavailable
from reclaimnet.model.units import HOUR, SECOND

CALL_TIMEOUT_S: Final = 30.0
"""A controller that is down lets its commands hang for up to ten seconds; a busy one for longer."""
FRESH: Final = 4 * SECOND
"""An answer that another watcher of the same user got less than this ago is as good as our own."""
HISTORY_FRESH: Final = HOUR
HISTORY_DAYS: Final = 3
KILL_WAIT: Final = 30 * SECOND
"""Slurm's default."""
MAX_HISTORY: Final = 5_000
MAX_IDS_PER_CALL: Final = 200


class SubmitFailed(ReclaimNetError):
    """sbatch did not take the job; `kind` says whether it ever may."""

    def __init__(self, text: str) -> None:
        super().__init__(explained(text))
        self.kind = refusal(text)


class Slurm:
    """All calls raise Unavailable if the controller does not answer."""

    def __init__(self, folder: Path, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        if shutil.which("sbatch") is None or shutil.which("squeue") is None:
            raise Unavailable(
                "there is no Slurm here: sbatch is not on PATH; run this on a login node of the "
                "cluster, or load its module first"
            )
        self._folder = folder
        self._timeout_s = timeout_s
        self._no_history = False
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    # --- looking ----------------------------------------------------------------------------

    def jobs_of(self, user: str, *, not_before: int = 0) -> list[Row]:
        """Jobs of one user, those that ended in the last minutes included."""
        text = self._shared(
            f"squeue-{user}",
            lambda: self._squeue("-u", user),
            fresh=FRESH,
            not_before=not_before,
        )
        return parse_squeue(text)

    def all_jobs(self, *, not_before: int = 0) -> list[Row]:
        text = self._shared("squeue", self._squeue, fresh=FRESH, not_before=not_before)
        return parse_squeue(text)

    def partitions(self) -> dict[str, PartitionRow]:
        layout = SEPARATOR.join(SINFO_FIELDS)
        text = self._shared(
            "sinfo", lambda: self._call("sinfo", "--noheader", "-o", layout), fresh=FRESH
        )
        return parse_sinfo(text)

    def ended_lately(self) -> list[Row]:
        """From the accounting database, where there is one; asked for rarely."""
        if self._no_history:
            return []
        try:
            text = self._shared(
                "sacct",
                lambda: self._sacct("-a", "-S", f"now-{HISTORY_DAYS}days"),
                fresh=HISTORY_FRESH,
            )
        except Unavailable as error:
            # Without a database it will never be there; a silent one may answer next time.
            self._no_history = "disabled" in str(error)
            return []
        return parse_sacct(text)[-MAX_HISTORY:]

    def remembered(self, ids: Sequence[str]) -> list[Row]:
        """Jobs that squeue has forgotten, where there is an accounting database."""
        if self._no_history or not ids:
            return []
        try:
            return parse_sacct(self._sacct("-j", ",".join(ids[:MAX_IDS_PER_CALL])))
        except Unavailable:
            return []

    def warning_of(self, partition: str) -> tuple[int, int]:
        """In nanoseconds: what a preempted batch script is given before SIGTERM (0 if it is not
        told at all), and what SIGTERM leaves before SIGKILL."""
        shown = self._call("scontrol", "--oneliner", "show", "partition", partition)
        config = self._call("scontrol", "show", "config")
        grace = re.search(r"\bGraceTime=(\d+)", shown)
        wait = re.search(r"^KillWait\s*=\s*(\d+)", config, re.MULTILINE)
        # Without this a script sees nothing of the grace time: only steps are told.
        told = re.search(
            r"^SlurmctldParameters\s*=.*preempt_send_user_signal", config, re.MULTILINE
        )
        return (
            int(grace[1]) * SECOND if grace and told else 0,
            int(wait[1]) * SECOND if wait else KILL_WAIT,
        )

    # --- acting -----------------------------------------------------------------------------

    def submit(self, script: Path, *options: str) -> str:
        """The id of the job. Raises SubmitFailed."""
        try:
            text = self._call("sbatch", "--parsable", *options, str(script))
        except Unavailable as error:
            raise SubmitFailed(str(error.__cause__ or error)) from error
        id = text.strip().splitlines()[-1].partition(";")[0] if text.strip() else ""
        if not id.isdigit():
            raise SubmitFailed(f"sbatch did not answer with a job's number but with {text!r}")
        return id

    def cancel(self, ids: Sequence[str]) -> None:
        """Jobs that are gone already are no fault."""
        for first in range(0, len(ids), MAX_IDS_PER_CALL):
            self._forgiving("scancel", *ids[first : first + MAX_IDS_PER_CALL])

    def signal(self, id: str, name: str) -> None:
        """To the job's script and all that it has started."""
        self._forgiving("scancel", f"--signal={name}", "--batch", id)

    def drain(self, node: str, reason: str) -> None:
        self._call("scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}")

    def resume(self, node: str) -> None:
        self._call("scontrol", "update", f"nodename={node}", "state=resume")

    def node(self, name: str) -> dict[str, str]:
        """What `scontrol show node` says: State, Gres, Reason and so on."""
        text = self._call("scontrol", "--oneliner", "show", "node", name)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    # --- calling ----------------------------------------------------------------------------

    def _squeue(self, *options: str) -> str:
        layout = SEPARATOR.join(SQUEUE_FIELDS)
        return self._call("squeue", "--noheader", "-a", "-t", "all", "-o", layout, *options)

    def _sacct(self, *options: str) -> str:
        fields = ",".join(SACCT_FIELDS)
        return self._call(
            "sacct", "-X", "--noheader", "--parsable2", f"--delimiter={SEPARATOR}", "-o", fields,
            *options,
        )  # fmt: skip

    def _forgiving(self, *words: str) -> None:
        try:
            self._call(*words)
        except Unavailable as error:
            if refusal(str(error)) is Refusal.SILENT:
                raise

    def _call(self, *words: str) -> str:
        env = {**os.environ, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
        try:
            done = subprocess.run(
                words,
                check=False,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._timeout_s,
                env=env,
            )
        except subprocess.TimeoutExpired as error:
            raise Unavailable(
                f"Slurm did not answer {words[0]} within {self._timeout_s:.0f} s"
            ) from error
        except OSError as error:
            raise Unavailable(f"{words[0]} cannot be run: {error}") from error
        if done.returncode != 0:
            raise Unavailable(explained(done.stderr or done.stdout)) from RuntimeError(
                done.stderr or done.stdout
            )
        return done.stdout

    def _shared(self, name: str, ask: Callable[[], str], *, fresh: int, not_before: int = 0) -> str:
        """The answer that anybody with this folder got a moment ago, or a new one."""
        path = self._folder / f"{name}.json"
        with _locked(path.with_suffix(".lock")):
            now = time.time_ns()
            try:
                kept = json.loads(path.read_text())
                asked = int(kept["asked"])
                if asked >= not_before and 0 <= now - asked < fresh:
                    return str(kept["text"])
            except (OSError, ValueError, KeyError, TypeError):
                pass
            text = ask()
            draft = path.with_suffix(".tmp")
            draft.write_text(json.dumps({"asked": now, "text": text}))
            draft.replace(path)
            return text


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Those who wait for the lock then find the answer of who held it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
