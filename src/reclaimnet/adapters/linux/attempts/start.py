"""How an attempt is started: what is made for it, what it gets to see, and its minder."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import reclaimnet
from reclaimnet.adapters.linux import cell, egress, minder, sandbox
from reclaimnet.adapters.linux.attempts.attempt import Attempt
from reclaimnet.adapters.linux.attempts.places import DESCRIPTION, SAFE_NAME, Places
from reclaimnet.adapters.linux.boot import boot_id
from reclaimnet.adapters.linux.page import guest_page, make_page
from reclaimnet.errors import UsageError
from reclaimnet.model.market import GpuId, JobId
from reclaimnet.model.page import AT_ONCE, Word
from reclaimnet.model.work import JobSpec, Saving

MAX_OOM_SCORE: Final = 1000
MIN_OOM_SCORE: Final = 300
GUEST_NICE: Final = 10
"""By how much nicer than the agent: against anything of the owner's that wants the same processor a
guest has a tenth of it, alone all of it."""
NICEST: Final = 19
OOM_SCORE_STEP: Final = 50
"""One step of priority: should the kernel choose after all, it chooses in our rank, but always a
guest before anything of the owner's."""
KEPT_ENVIRONMENT: Final = (
    "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER",
)  # fmt: skip
"""What a job sees of the agent's own environment, which may hold secrets."""

_MINDER: Final = Path(minder.__file__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be run here, and from where on."""

    job: JobId
    epoch: int
    spec: JobSpec
    gpus: tuple[GpuId, ...]
    workdir: Path
    resume: Path | None = None
    restarts: int = 0
    changed: Sequence[tuple[int, int]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """Makes all that an attempt needs before its minder starts. `guests` is the sandbox that
    attempts run in; those started ahead in one find their state in `resumes`/JOB.EPOCH."""

    places: Places
    guests: sandbox.Sandbox | None
    resumes: Path | None
    nice: int

    def make(self, task: Task) -> Attempt:
        """The run directory and all that is in it, with nothing granted; raises OSError and
        Unavailable for the node's faults, UsageError for the job's, and leaves nothing then."""
        if not SAFE_NAME.fullmatch(task.job):
            raise UsageError(f"{task.job!r} cannot be the name of a directory")
        if not task.spec.command:
            raise UsageError("the job has no command")
        if self.guests is not None:
            _check_for_sandbox(self.guests, task.spec)
        directory = self.places.run_of(task.job, task.epoch)
        directory.mkdir(mode=0o700)
        try:
            return self._furnish(task, directory)
        except BaseException:
            self.places.remove(directory.name)
            raise

    def _furnish(self, task: Task, directory: Path) -> Attempt:
        spec, name = task.spec, directory.name
        for part in ("checkpoint", "lib"):
            (directory / part).mkdir()
        output = self.places.output_of(task.job, task.epoch)
        output.mkdir(parents=True, exist_ok=True)
        # Whatever Python the job uses, it finds the SDK, and nothing else of the agent's.
        (directory / "lib" / "reclaimnet").symlink_to(Path(reclaimnet.__file__).parent)
        os.mkfifo(directory / "bell", 0o600)
        images = self.places.make_images(name)
        group = self.places.make_group(name)
        memory = self.places.make_memory_group(name, group, spec.memory_bytes)
        page = make_page(directory / "page")
        attempt = Attempt(
            job=task.job,
            epoch=task.epoch,
            saving=spec.saving,
            gpus=task.gpus,
            dir=directory,
            images=images,
            output=output,
            group=group,
            memory=memory,
            words=page if self.guests is None else guest_page(page, directory / "page"),
        )
        text: dict[str, Any] = {
            "job": task.job,
            "epoch": task.epoch,
            "saving": spec.saving,
            "gpus": task.gpus,
            "argv": spec.command,
            "cwd": str(_real(task.workdir)),
            "env": _environment(attempt, task),
            "images": str(images),
            "group": None if group is None else str(group),
            "memory": None if memory is None else str(memory),
            "memory_limit": spec.memory_bytes,
            "pids": None,
            "sandbox": None,
            "nice": min(self.nice + GUEST_NICE, NICEST),
            "oom_score": _oom_score(spec.priority),
            "boot": boot_id(),
            "words": {word.name: int(word) for word in Word},
            "at_once": AT_ONCE,
        }
        if self.guests is not None:
            text |= self._confine(self.guests, attempt, task, text["env"])
        minder.write_whole(str(directory / DESCRIPTION), json.dumps(text))
        return attempt

    def _confine(
        self, guests: sandbox.Sandbox, attempt: Attempt, task: Task, env: dict[str, str]
    ) -> dict[str, Any]:
        """What the description says of an attempt in a sandbox."""
        env = env | {"HOME": sandbox.GUEST_HOME, "TMPDIR": "/tmp"} | dict(task.spec.env)
        placed = sandbox.place(guests, self._rooms(attempt, task), task.gpus, env)
        if guests.network is sandbox.Network.CAMPUS:
            if attempt.group is None:
                raise OSError("its packets cannot be kept within the campus")
            egress.confine(attempt.group, guests.campus)
        name = self.places.group_name(attempt.dir.name)
        pids = sandbox.bound_pids(attempt.group, name, guests.pids)
        shared = pids in (None, attempt.group)
        return {"env": env, "sandbox": placed, "pids": None if shared else str(pids)}

    def _rooms(self, attempt: Attempt, task: Task) -> sandbox.Rooms:
        resume = task.resume
        if resume is None and self.resumes is not None:
            resume = self.resumes / attempt.dir.name
            resume.mkdir(parents=True, exist_ok=True, mode=0o700)
        return sandbox.Rooms(
            run=attempt.dir,
            images=attempt.images,
            work=_real(task.workdir),
            output=attempt.output,
            shared_work=_brings_own_path(task.spec),
            resume=None if resume is None else resume.resolve(),
        )


def _real(workdir: Path) -> Path:
    """Its submitter may have named anything."""
    try:
        return workdir.resolve()
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"its working directory {workdir} cannot be: {error}") from error


def spawn_minder(attempt: Attempt) -> int:
    with (attempt.dir / "minder.err").open("wb") as err:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", str(_MINDER), str(attempt.dir)],
            kept_environment(),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, err.fileno(), 2),
            ],
            setsid=True,
            # Blocked from its first moment on, so that an early nudge cannot kill it.
            setsigmask=[signal.SIGUSR1, signal.SIGCHLD],
        )


def _environment(attempt: Attempt, task: Task) -> dict[str, str]:
    env = kept_environment()
    # `python` is the agent's, which has numpy and the SDK, unless the job says otherwise.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    env["PYTHONUNBUFFERED"] = "1"
    env["WANDB_RUN_ID"] = attempt.job
    env["WANDB_RESUME"] = "allow"
    env.update(task.spec.env)
    if attempt.saving is Saving.CRIU:
        return env | _cell_environment(attempt, task.restarts)
    paths = [env.get("PYTHONPATH", ""), str(attempt.dir / "lib")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    source = attempt.checkpoint if attempt.saving is Saving.SIGNAL else task.resume
    return env | {
        "RN_JOB_ID": attempt.job,
        "RN_EPOCH": str(attempt.epoch),
        "RN_RESTART_COUNT": str(task.restarts),
        "RN_RUN_DIR": str(attempt.dir),
        "RN_IMAGE_DIR": str(attempt.images),
        "RN_CHECKPOINT_DIR": str(attempt.checkpoint),
        "RN_RESUME_FROM": "" if task.resume is None else str(source),
        "RN_NOTICE_FILE": str(attempt.dir / "notice.json"),
        "RN_OUTPUT_DIR": str(attempt.output),
        "CUDA_VISIBLE_DEVICES": ",".join(attempt.gpus),
        "SLURM_JOB_ID": attempt.job,
        "SLURM_RESTART_COUNT": str(task.restarts),
    }


def _cell_environment(attempt: Attempt, restarts: int) -> dict[str, str]:
    """Only what is the same on every node: its environment moves with it. GPUs it has none,
    since CRIU cannot save their memory. Nor a run directory, by which orphans are known: its
    cell dies with the minder, and another agent's job must not be taken for one."""
    return {
        "RN_JOB_ID": attempt.job,
        "RN_RESTART_COUNT": str(restarts),
        "RN_OUTPUT_DIR": f"{cell.ROOM}/output",
        "CUDA_VISIBLE_DEVICES": "",
        "SLURM_JOB_ID": attempt.job,
        "SLURM_RESTART_COUNT": str(restarts),
    }


def kept_environment() -> dict[str, str]:
    """What a job would see of this process's own environment."""
    return {key: os.environ[key] for key in KEPT_ENVIRONMENT if key in os.environ}


def _oom_score(priority: int) -> int:
    score = minder.GUEST_OOM_SCORE - OOM_SCORE_STEP * priority
    return min(max(score, MIN_OOM_SCORE), MAX_OOM_SCORE)


def _check_for_sandbox(guests: sandbox.Sandbox, spec: JobSpec) -> None:
    if spec.saving is Saving.CRIU:
        raise UsageError("guests are in a sandbox here, and CRIU cannot save one")
    if _brings_own_path(spec) and not sandbox.shared(guests, Path(spec.workdir or "/")):
        raise UsageError(
            f"its working directory {spec.workdir} is not shared by the owner of this machine; "
            "submit it without --no-ship"
        )


def _brings_own_path(spec: JobSpec) -> bool:
    """Whether its submitter named a directory of this machine to work in."""
    return spec.bundle is None and spec.workdir is not None
