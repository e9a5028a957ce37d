"""Run the doors with atheris: `python -m tests.fuzz.fuzz RUNS [DOOR...]`.

Every door is fuzzed in a process of its own, for so many executions and no longer: what is tried
depends on RUNS alone, so that it is the same in every run. What breaks a door is told with the
bytes that did it, and belongs among the seeds of doors.py from then on.
"""

import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["reclaimnet"]):
    from tests.fuzz.doors import Door, chunk_server, doors, of_chunks

MAX_BYTES = 4096
SEED = 1


def _fuzz(door: Door, runs: int, folder: Path) -> None:
    corpus = folder / f"seeds-{door.name}"
    corpus.mkdir()
    for number, data in enumerate(door.seeds):
        (corpus / str(number)).write_bytes(data)
    argv = [sys.argv[0], str(corpus), f"-runs={runs}", f"-seed={SEED}", f"-max_len={MAX_BYTES}"]
    argv += [f"-artifact_prefix={folder}/{door.name}-", "-verbosity=0", "-print_final_stats=0"]
    atheris.Setup(argv, door.try_)
    atheris.Fuzz()


def main() -> int:
    runs, wanted = int(sys.argv[1]), sys.argv[2:]
    # Not a TemporaryDirectory: the first child to exit would remove it for all.
    folder = Path(tempfile.mkdtemp(prefix="rn-fuzz-"))
    try:
        with chunk_server(folder) as (server, seeds):
            found = (*doors(folder), of_chunks(server, seeds))
            broken = [door for door in found if not wanted or door.name in wanted]
            broken = [door for door in broken if not _holds(door, runs, folder)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if broken else 0


def _holds(door: Door, runs: int, folder: Path) -> bool:
    child = os.fork()
    if child == 0:
        # libFuzzer ends the process itself; whatever happens, a child does not go on as its parent.
        try:
            _fuzz(door, runs, folder)
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 0)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    print(f"{'ok  ' if code == 0 else 'FAIL'} {door.name}", flush=True)
    if code != 0:
        for found in folder.glob(f"{door.name}-*"):
            print(f"{found.name}: {found.read_bytes()!r}", file=sys.stderr)
    return code == 0


if __name__ == "__main__":
    sys.exit(main())
