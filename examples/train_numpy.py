"""A small network that really learns, and survives being moved: the SDK in one screen.

    python train_numpy.py --steps 500            # anywhere, without ReclaimNet
    rn run --gpus 1 -- python train_numpy.py     # on the campus

The result is the same bit for bit whether the run was interrupted or not: all that decides it,
the random generator included, is in the state.
"""

import argparse
import hashlib
import time

import numpy as np

from reclaimnet import sdk

INPUTS, HIDDEN, BATCH = 16, 64, 128
SHAPES = {"w1": (INPUTS, HIDDEN), "b1": HIDDEN, "w2": HIDDEN}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds to sleep in each step")
    parser.add_argument("--padding", type=int, default=0, help="MiB of state besides the network")
    parser.add_argument("--dense", action="store_true", help="change all the padding in each step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--local", help="keep checkpoints in this directory when run on its own")
    return parser.parse_args()


def first_state(seed: int, padding_mib: int) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "step": 0,
        "w1": rng.normal(0, INPUTS**-0.5, (INPUTS, HIDDEN)),
        "b1": np.zeros(HIDDEN),
        "w2": rng.normal(0, HIDDEN**-0.5, HIDDEN),
        "velocity": {name: np.zeros(shape) for name, shape in SHAPES.items()},
        "rng": rng.bit_generator.state,
        "padding": rng.integers(0, 2**32, padding_mib << 18, dtype=np.uint32),
        "losses": [],
    }


def one_step(state: dict, rng: np.random.Generator, teacher: np.ndarray) -> float:
    """Stochastic gradient descent with momentum on fresh samples of a fixed function."""
    x = rng.normal(size=(BATCH, INPUTS))
    y = np.sin(x @ teacher)
    hidden = np.tanh(x @ state["w1"] + state["b1"])
    error = hidden @ state["w2"] - y
    back = np.outer(error, state["w2"]) * (1 - hidden**2) / BATCH
    gradients = {"w1": x.T @ back, "b1": back.sum(axis=0), "w2": hidden.T @ error / BATCH}
    for name, gradient in gradients.items():
        velocity = state["velocity"][name]
        velocity *= 0.9
        velocity -= 0.05 * gradient
        state[name] += velocity
    return float(np.mean(error**2))


def digest(state: dict) -> str:
    parts = [state["w1"], state["b1"], state["w2"], state["padding"], np.array(state["losses"])]
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:16]


def main() -> None:
    args = parse()
    teacher = np.random.default_rng(0).normal(0, INPUTS**-0.5, INPUTS)
    with sdk.job(local=args.local) as job:
        state = job.restore(lambda: first_state(args.seed, args.padding))
        rng = np.random.default_rng()
        rng.bit_generator.state = state["rng"]
        print(f"from step {state['step']}, start number {job.restarts}")
        while state["step"] < args.steps:
            loss = one_step(state, rng, teacher)
            if args.dense:
                state["padding"] *= np.uint32(2654435761)
            time.sleep(args.delay)
            state["step"] += 1
            state["rng"] = rng.bit_generator.state
            if state["step"] % 50 == 0:
                state["losses"].append(loss)
                print(f"step {state['step']}: loss {loss:.4f}")
            job.step(state["step"], state)
    losses = state["losses"]
    learned = f"loss {losses[0]:.4f} -> {losses[-1]:.4f}" if losses else "no loss noted yet"
    print(f"done: {learned}, {digest(state)}")


if __name__ == "__main__":
    main()
