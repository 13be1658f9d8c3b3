"""A training in which one rank raises, is killed or hangs: as one rank of a world, or started by a launcher.

``python -m tests.conformance.failing FOLDER HOW WHERE RANK TIMEOUT_S`` trains on two ranks. Every rank writes into
FOLDER what ``fit`` raised for it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.distributed.distributed_c10d import _set_pg_timeout

from lightning_autoparallel.strategy import roll_call, saving
from tests.distributed.jobs import MESH, Net, make_strategy, make_trainer

AT = 2  # the step at which a rank fails, and the number of steps that are saved before
MESHES = {2: MESH, 4: {"dp_replicate": 2, "dp_shard": 2}}
HOWS = ("raises", "killed", "hangs")
WHERES = ("step", "hook", "validation", "saving")


@dataclass(frozen=True)
class Fault:
    """``rank`` raises, is killed or hangs (``how``) in the step, a hook, validation or saving (``where``)."""

    how: str
    where: str
    rank: int = 1
    timeout_s: float = 20
    options: tuple[tuple[str, Any], ...] = ()
    ranks: int = 2

    def __str__(self) -> str:
        world = [f"of{self.ranks}"] * (self.ranks > 2)
        return "-".join([self.how, self.where, f"rank{self.rank}", *world, *(name for name, _ in self.options)])

    def strike(self, where: str, step: int) -> None:
        """Fail, if this is the rank and the moment."""
        if where != self.where or step != AT or dist.get_rank() != self.rank:
            return
        if self.how == "raises":
            raise ValueError("a fault of the test")
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)


class Faulty(Net):
    """Validates after every step."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def training_step(self, batch, batch_idx):
        if self.fault.where == "step":
            self.fault.strike("step", self.trainer.global_step)
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self):
        self.fault.strike("validation", self.trainer.global_step)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.fault.strike("hook", self.trainer.global_step)


class Saves(Callback):
    """Saves to one path after every step."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.path)


@contextlib.contextmanager
def striking_writes(fault: Fault) -> Iterator[None]:
    """A rank fails in the write of a checkpoint: of a folder on any rank, of a file on rank 0."""
    folder, file, written = saving.save_folder, saving.SavingStrategy._write_file, itertools.count(1)

    def write_folder(*args: Any) -> None:
        fault.strike("saving", next(written))
        folder(*args)

    def write_file(self: Any, *args: Any) -> None:
        fault.strike("saving", next(written))
        file(self, *args)

    with (
        mock.patch.object(saving, "save_folder", write_folder),
        mock.patch.object(saving.SavingStrategy, "_write_file", write_file),
    ):
        yield


def fit(folder: str, fault: Fault) -> None:
    """Train; what `fit` raises is written to a file of the rank's, and raised."""
    torch.manual_seed(0)
    if dist.is_initialized():  # by others, who had no reason to be impatient
        _set_pg_timeout(timedelta(seconds=fault.timeout_s), dist.group.WORLD)
    module = Faulty(fault)
    strategy = make_strategy(
        MESHES[fault.ranks], {"timeout": timedelta(seconds=fault.timeout_s), **dict(fault.options)}
    )
    trainer = make_trainer(
        strategy, fault.ranks, callbacks=[Saves(f"{folder}/run.ckpt")], val_check_interval=1, limit_val_batches=1
    )
    loader = lambda: module.loader(strategy.mesh.data_parallel_rank, strategy.mesh.data_parallel_size)  # noqa: E731
    module.train_dataloader = module.val_dataloader = loader
    # of four ranks some meet the dead one only by a timeout, and then ask the others what they know
    after_s = 5.0 if fault.ranks == 2 else 15.0
    with striking_writes(fault), mock.patch.object(roll_call, "_AFTER_TIMEOUT_S", after_s):
        try:
            trainer.fit(module)
        except BaseException as error:
            rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0")
            Path(folder, f"rank{rank}.json").write_text(
                json.dumps({"kind": type(error).__name__, "text": str(error), "trace": traceback.format_exc()})
            )
            raise


if __name__ == "__main__":
    fit(sys.argv[1], Fault(sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])))
