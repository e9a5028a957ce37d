"""Lightning, made movable by one callback: it saves when it is asked to, and goes on from there.

rn run --saving signal -- python train_lightning.py --steps 1000
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import lightning
import torch

directory = Path(os.environ.get("RN_CHECKPOINT_DIR", "checkpoint"))
newest = directory / "newest.ckpt"


class SaveWhenAsked(lightning.Callback):
    """At the end of a batch, and not in the signal's handler, where the state is half of a step."""

    def __init__(self) -> None:
        self.wanted: set[int] = set()

    def on_train_start(self, trainer, module) -> None:
        # Not before: Lightning sets handlers of its own when it begins to fit.
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, lambda number, _: self.wanted.add(number))
        print(f"from step {trainer.global_step}", flush=True)

    def on_train_batch_end(self, trainer, module, outputs, batch, index) -> None:
        if not self.wanted:
            return
        trainer.save_checkpoint(newest.with_suffix(".new"))
        newest.with_suffix(".new").replace(newest)
        (directory / ".saved").write_text(str(trainer.global_step))
        print(f"saved at step {trainer.global_step}", flush=True)
        if signal.SIGTERM in self.wanted:
            raise SystemExit(85)  # saved, run me again
        self.wanted.clear()


class Line(lightning.LightningModule):
    """Learns y = 3 x."""

    def __init__(self, delay: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.delay = delay

    def training_step(self, batch, index):
        time.sleep(self.delay)
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--delay", type=float, default=0.01)
    args = parser.parse_args()
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    x = torch.rand(256, 1)
    data = torch.utils.data.TensorDataset(x, 3 * x)
    trainer = lightning.Trainer(
        accelerator="auto",
        max_steps=args.steps,
        callbacks=[SaveWhenAsked()],
        logger=False,
        # The callback saves; what Lightning would save besides is nobody's.
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    trainer.fit(Line(args.delay), loader, ckpt_path=str(newest) if newest.exists() else None)
    print(f"done at step {trainer.global_step}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
