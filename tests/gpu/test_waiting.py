"""From a batch's arrival on a GPU to the step's end nothing waits for the device that does not without us."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import nn

from tests.distributed.jobs import Net, make_strategy, make_trainer

pytestmark = pytest.mark.gpu

WARM, STEPS = 3, 8


class Logging(Net):
    """Clips, accumulates nothing, logs its loss and numbers of Python, which without us are copied one by one."""

    steps = STEPS

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.log("half", 0.5)
        self.log_dict({"one": 1, "quarter": 0.25}, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class Watched(Callback):
    """Torch warns of every wait between a batch's start and its end, once kernels are compiled and state is made."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        self._caught: Any = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx >= WARM:
            self._catcher = warnings.catch_warnings(record=True)
            self._caught = self._catcher.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx >= WARM:
            torch.cuda.set_sync_debug_mode("default")
            self._catcher.__exit__(None, None, None)
            found = [warning for warning in self._caught if "synchroniz" in str(warning.message)]
            self.waits += [f"batch {batch_idx}: {w.filename}:{w.lineno}: {w.message}" for w in found]


class Waiting(Logging):
    """Reads its loss on the host at every step."""

    def on_before_backward(self, loss):
        float(loss)


def watched(kind: type[Net], ours: bool, compiled: bool) -> tuple[list[str], dict[str, str]]:
    """The waits of a training's later steps, and how its steps ran."""
    torch.manual_seed(0)
    module, watch = kind(), Watched()
    strategy = make_strategy({"dp_shard": 1}, {"compile": compiled}) if ours else None
    module.train_dataloader = lambda: module.loader(0, 1)
    options = {"accelerator": "gpu", "gradient_clip_val": 0.5, "log_every_n_steps": 1000, "callbacks": [watch]}
    make_trainer(strategy, 1, **options).fit(module)
    return watch.waits, strategy.modes if strategy is not None else {}


@pytest.mark.parametrize("compiled", [False, True], ids=["interpreted", "compiled"])
def test_no_step_waits_for_the_device(compiled: bool, accelerator: str, gpu_world):
    if accelerator == "cpu":
        pytest.skip("a CPU waits for nothing")
    theirs, _ = gpu_world().run(watched, Logging, False, False)[0]
    ours, modes = gpu_world().run(watched, Logging, True, compiled)[0]
    assert modes == {"training_step": "step"}
    assert len(theirs) >= 3 * (STEPS - WARM) and ours == []
    assert len(gpu_world().run(watched, Waiting, True, compiled)[0][0]) >= STEPS - WARM  # it would have been seen
