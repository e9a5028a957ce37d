"""Every door of doors.py is tried: with its seeds, with seeds that were bent, and by the fuzzer."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fuzz.doors import Door, chunk_server, doors, of_chunks

ROOT = Path(__file__).resolve().parents[2]
BENT = 60
"""Bent copies of each seed."""
RUNS = 300
"""Executions of the fuzzer at each door; `python -m tests.fuzz.fuzz 1000000 wire` looks further."""
NAMES = (
    "wire", "manifest", "subject", "guard", "slurm", "trace", "toml", "files", "words", "mark",
    "kube", "units", "certificate", "archives", "image", "cell", "guest", "journal", "http",
    "chunks",
)  # fmt: skip


@pytest.fixture(scope="module")
def all_doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Door]]:
    folder = tmp_path_factory.mktemp("doors")
    with ExitStack() as stack:
        server, seeds = stack.enter_context(chunk_server(folder))
        yield {door.name: door for door in (*doors(folder), of_chunks(server, seeds))}


def bent(data: bytes, chance: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(made) + 1)
        match chance.randrange(4):
            case 0:
                made[place : place + 1] = chance.randbytes(1)
            case 1:
                del made[place : place + chance.randint(1, 8)]
            case 2:
                made[place:place] = chance.choice([b"9" * 20, b"-1", b"\0", b"null", b"[[", b'"'])
            case _:
                made = made[:place]
    return bytes(made)


def test_all_doors_are_named(all_doors: dict[str, Door]) -> None:
    assert tuple(all_doors) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_bent_bytes_are_understood_or_refused(all_doors: dict[str, Door], name: str) -> None:
    door = all_doors[name]
    chance = random.Random(1)
    for seed in door.seeds:
        door.try_(seed)
        for _ in range(BENT):
            door.try_(bent(seed, chance))


@pytest.mark.needs("atheris")
def test_the_fuzzer_breaks_no_door() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.fuzz", str(RUNS)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    told = done.stdout + "\n".join(
        line for line in done.stderr.splitlines() if not line.startswith("INFO:")
    )
    assert done.returncode == 0, told[-4000:]
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("ok")] == [
        *NAMES
    ]
