"""Run the doors with atheris: `python -m tests.fuzz.fuzz RUNS [DOOR...]`.

Every door is fuzzed in a process of its own, for so many executions and no longer: what is tried
depends on RUNS alone, so that it is the same in every run. What breaks a door is told with the
bytes that did it, and belongs among the seeds of doors.py from then on.
"""

import os
import sys
import tempfile
from contextlib import ExitStack
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
    broken = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server, seeds = stack.enter_context(chunk_server(folder))
        for door in (*doors(folder), of_chunks(server, seeds)):
            if wanted and door.name not in wanted:
                continue
            child = os.fork()
            if child == 0:
                # libFuzzer ends the process itself, with a code.
                _fuzz(door, runs, folder)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            print(f"{'ok  ' if code == 0 else 'FAIL'} {door.name}", flush=True)
            if code != 0:
                broken.append(door.name)
                for found in folder.glob(f"{door.name}-*"):
                    print(f"{found.name}: {found.read_bytes()!r}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
