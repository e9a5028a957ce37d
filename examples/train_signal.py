"""A script that knows nothing of ReclaimNet: it saves on SIGUSR1 and SIGTERM, as for Slurm.

    rn run --saving signal -- python train_signal.py --steps 1000

Three habits make it movable. It writes to the directory it is told (here $RN_CHECKPOINT_DIR) and
resumes from it; it saves at a step boundary, not in the signal handler; and it touches `.saved`
last, so that nobody takes half a checkpoint for a whole one.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

wanted: set[int] = set()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--delay", type=float, default=0.01)
    args = parser.parse_args()

    directory = Path(os.environ.get("RN_CHECKPOINT_DIR", "checkpoint"))
    directory.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: wanted.add(number))

    rng, step, total = random.Random(1), 0, 0.0
    if (directory / "state.json").exists():
        saved = json.loads((directory / "state.json").read_text())
        step, total = saved["step"], saved["total"]
        version, words, gauss = saved["rng"]
        rng.setstate((version, tuple(words), gauss))
    print(f"from step {step}", flush=True)

    while step < args.steps:
        total += rng.gauss(0, 1)
        step += 1
        time.sleep(args.delay)
        if wanted:
            save(directory, {"step": step, "total": total, "rng": rng.getstate()})
            if signal.SIGTERM in wanted:
                return 85  # saved, run me again
            wanted.clear()
    print(f"done: {total!r}", flush=True)
    return 0


def save(directory: Path, state: dict) -> None:
    draft = directory / "state.json.new"
    draft.write_text(json.dumps(state))
    draft.replace(directory / "state.json")
    (directory / ".saved").write_text(str(state["step"]))
    print(f"saved at step {state['step']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
