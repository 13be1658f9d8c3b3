"""A training that torchrun starts anew when a rank is killed: ``... -m tests.conformance.restarted FOLDER AS_FOLDER``.

In the first attempt rank 1 is killed in the middle; every attempt goes on from the last checkpoint in FOLDER.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.conformance.saved import ALL, HALF, MESHES, Run, state_of
from tests.distributed.jobs import Losses, make_strategy, make_trainer


class Killed(Run):
    """Until it is started again."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == HALF and dist.get_rank() == 1 and not restarts():
            os.kill(os.getpid(), signal.SIGKILL)


def restarts() -> int:
    """How often torchrun has started the ranks again."""
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def main(folder: str, as_folder: bool) -> None:
    """Train to the end; rank 0 writes what it saw."""
    torch.manual_seed(0)
    module, losses = Killed(), Losses()
    strategy = make_strategy(MESHES["2"], {"save_distributed_checkpoint": as_folder})
    saves = ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)
    trainer = make_trainer(
        strategy, 2, max_steps=ALL, max_epochs=-1, enable_checkpointing=True, callbacks=[losses, saves]
    )
    module.train_dataloader = lambda: module.loader(strategy.mesh.data_parallel_rank, 2)
    trainer.fit(module, ckpt_path="last")
    if trainer.is_global_zero:
        weights = {name: value.tolist() for name, value in state_of(trainer, module).items() if name == "scale"}
        seen = {"losses": losses.values, "restarts": restarts(), "step": trainer.global_step, **weights}
        Path(folder, "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "folder")
