"""The Trainer of transformers, made movable by one callback: it saves when it is asked to.

rn run --saving signal -- python train_transformers.py --steps 1000
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

directory = Path(os.environ.get("RN_CHECKPOINT_DIR", "checkpoint"))
wanted: set[int] = set()


class SaveWhenAsked(TrainerCallback):
    """The Trainer itself saves between two steps, once it is told to by a callback."""

    def on_train_begin(self, args, state, control, **kwargs):
        print(f"from step {state.global_step}", flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        if wanted:
            control.should_save = True
            control.should_training_stop = signal.SIGTERM in wanted

    def on_save(self, args, state, control, **kwargs):
        (directory / ".saved").write_text(str(state.global_step))
        print(f"saved at step {state.global_step}", flush=True)
        wanted.discard(signal.SIGUSR1)


class Line(torch.nn.Module):
    """Learns y = 3 x."""

    def __init__(self, delay: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.delay = delay

    def forward(self, x, labels):
        time.sleep(self.delay)
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--delay", type=float, default=0.01)
    args = parser.parse_args()
    directory.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: wanted.add(number))
    x = torch.rand(256, 1, generator=torch.Generator().manual_seed(1))
    data = [{"x": each, "labels": 3 * each} for each in x]
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=args.steps,
        per_device_train_batch_size=16,
        save_strategy="no",
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = Trainer(Line(args.delay), arguments, train_dataset=data, callbacks=[SaveWhenAsked()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(directory)))
    if signal.SIGTERM in wanted:
        return 85  # saved, run me again
    print(f"done at step {trainer.state.global_step}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
