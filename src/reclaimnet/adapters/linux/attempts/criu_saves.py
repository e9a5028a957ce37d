"""Saving by CRIU: the processes live in a cell, and are stopped and saved with their files."""

import functools
import json
import os
import shutil
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from reclaimnet.adapters.linux import cell, criu, minder
from reclaimnet.adapters.linux.attempts.aside import Aside
from reclaimnet.adapters.linux.attempts.attempt import SAVE_PATIENCE, Attempt, CriuSave
from reclaimnet.adapters.linux.attempts.reports import Tell
from reclaimnet.model.page import SLOTS, Word
from reclaimnet.model.work import JobSpec

HOME: Final = "home.json"
"""Which files belong to a job in a cell, and what they were like before it."""

_CELL: Final = Path(cell.__file__)


class CriuSaves:
    """What the processes may have written is copied before they go on. A final save leaves them
    stopped."""

    def __init__(self, tell: Tell, aside: Aside) -> None:
        self._tell = tell
        self._aside = aside

    def ask(self, attempt: Attempt, *, final: bool) -> None:
        if attempt.criu_save is not None:
            attempt.criu_save.final |= final
        elif attempt.stopped:
            self._tell(attempt.took(_image(attempt), None, final=True))
        else:
            attempt.criu_save = CriuSave(final=final, asked_at=time.monotonic_ns())

    def drop(self, attempt: Attempt) -> None:
        """The job goes on, saved or not."""
        # A save that has begun finds itself dropped when it is done, and lets go.
        attempt.criu_save = None
        if not attempt.words[Word.DUMPING_UNTIL]:
            let_go(attempt)

    def look(self, attempt: Attempt, now: int) -> None:
        save = attempt.criu_save
        if save is None:
            return
        if save.target is None:
            if not attempt.words[Word.STILL]:
                self._dump(attempt, save, now)
            elif now - save.asked_at >= SAVE_PATIENCE:
                attempt.criu_save = None
                why = "it stands still, and CRIU needs it awake to save it"
                self._tell(attempt.save_failed(why))
        elif save.taken and attempt.stopped:
            attempt.criu_save = None
            self._tell(attempt.took(save.target, None, final=True, pause_ns=save.pause_ns))

    def _dump(self, attempt: Attempt, save: CriuSave, now: int) -> None:
        attempt.taken += 1
        save.target = _image(attempt)
        attempt.words[Word.DUMPING_UNTIL] = now + SAVE_PATIENCE
        self._aside.run(
            functools.partial(_take_image, attempt, save.target),
            lambda done: self._dumped(attempt, save, done),
        )

    def _dumped(self, attempt: Attempt, save: CriuSave, done: Future[int]) -> None:
        error = done.exception()
        wanted = attempt.criu_save is save and not attempt.over
        if error is None and wanted and save.final:
            # Held by the minder from here on, so that it stays so without us.
            save.taken, save.pause_ns = True, done.result()
            attempt.words[Word.HOLD] = attempt.taken
            attempt.words[Word.DUMPING_UNTIL] = 0
            attempt.nudge()
            return
        let_go(attempt)
        if not wanted:
            return
        attempt.criu_save = None
        if error is not None:
            self._tell(attempt.save_failed(str(error)))
        elif save.target is not None:
            self._tell(attempt.took(save.target, None, final=False, pause_ns=done.result()))


def let_go(attempt: Attempt) -> None:
    """It was stopped by CRIU, and perhaps by the minder as well."""
    attempt.words[Word.DUMPING_UNTIL] = 0
    attempt.release()
    if attempt.main and not attempt.over:
        for pid in minder.descendants(attempt.main):
            minder.send(pid, signal.SIGCONT)


def furnish(attempt: Attempt, spec: JobSpec, workdir: Path, resume: Path | None) -> None:
    """What the cell needs: the files where they belong, and their state before the job."""
    folders = {name: attempt.dir / name for name in ("tmp", "shm")}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
        folder.chmod(0o1777)
    if spec.bundle is not None or spec.workdir is None:
        # One that every node sees stays what it is.
        folders["work"] = workdir.resolve()
    before = criu.stamps(workdir) if "work" in folders else {}
    home = {"folders": {n: str(f) for n, f in folders.items()}, "stamps": before}
    minder.write_whole(str(attempt.dir / HOME), json.dumps(home))
    log = attempt.dir / "log"
    log.touch(mode=0o600)
    main = 0
    (attempt.dir / "criu").mkdir(exist_ok=True)
    if resume is not None:
        meta = criu.unpack(resume, folders)
        main = meta.main
        os.truncate(log, meta.log_bytes)
        attempt.words[Word.LOG_STORED] = attempt.log_read = meta.log_bytes
    file = attempt.dir / "attempt.json"
    text = json.loads(file.read_text())
    text["cell"] = _cell(attempt, folders, text["cwd"], resume, main)
    minder.write_whole(str(file), json.dumps(text))


def _cell(
    attempt: Attempt,
    folders: dict[str, Path],
    cwd: str,
    resume: Path | None,
    main: int,
) -> dict[str, Any]:
    binds = [
        (str(attempt.dir / "log"), "log"),
        (str(attempt.dir / "criu"), "criu"),
        (str(attempt.output), "output"),
    ]
    binds += [(str(folder), name) for name, folder in folders.items()]
    if "work" in folders:
        cwd = f"{cell.ROOM}/work"
    if resume is not None:
        binds.append((str((resume / criu.MEMORY).resolve()), "image"))
    covers = [(f"{cell.ROOM}/tmp", "/tmp"), (f"{cell.ROOM}/shm", "/dev/shm")]
    return {
        "program": str(_CELL),
        "cwd": cwd,
        "binds": binds,
        # What is below a directory that every node sees must stay in sight.
        "covers": [(source, place) for source, place in covers if not _within(cwd, place)],
        "restore": criu.restore_command("image") if resume is not None else None,
        "main": main,
    }


def _image(attempt: Attempt) -> Path:
    """Where the newest image is, or will be."""
    return attempt.dir / "criu" / str(attempt.taken % SLOTS)


def _take_image(attempt: Attempt, target: Path) -> int:
    """Returns how long the processes stood still, which they still do."""
    shutil.rmtree(target, ignore_errors=True)
    (target / criu.MEMORY).mkdir(parents=True)
    main = json.loads((attempt.dir / cell.WHO).read_text())["main"]
    began = time.monotonic_ns()
    images = f"{target.name}/{criu.MEMORY}"
    criu.dump(cell=attempt.main, main=main, folder=target.parent, images=images)
    home = json.loads((attempt.dir / HOME).read_text())
    criu.pack(
        target,
        {name: Path(folder) for name, folder in home["folders"].items()},
        {name: (a, b, c) for name, (a, b, c) in home["stamps"].items()},
        main=main,
        log=attempt.dir / "log",
    )
    shutil.copytree(attempt.output, target / criu.OUTPUT)
    return time.monotonic_ns() - began


def _within(path: str, folder: str) -> bool:
    return Path(path).resolve().is_relative_to(folder)
