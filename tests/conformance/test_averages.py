"""Callbacks that average weights: as on one device, saved and resumed, too."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn

from tests.conformance.saved import MESHES
from tests.distributed.jobs import Losses, Net, make_strategy, make_trainer
from tests.numerics.training import full
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance


class Averaged(Net):
    """Uneven shards; where asked, statistics of batches."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(7) if batch_norm else nn.LayerNorm(7)
        self.net = nn.Sequential(nn.Linear(6, 7), norm, nn.Tanh(), nn.Linear(7, 3))
        self.net[0].weight.mark = 1.0

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _callback(kind: str) -> Callback:
    return {
        "ema": lambda: EMAWeightAveraging(decay=0.8),
        "mean": lambda: WeightAveraging(),
        "no buffers": lambda: WeightAveraging(avg_fn=get_ema_avg_fn(0.7), use_buffers=False),
        "stochastic": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1),
    }[kind]()


def fit(kind: str, mesh: Mapping[str, int] | None, path: str | None, resume: bool, folder: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    # Stochastic averaging computes statistics anew with momentum=None, which reads their count: of a rank's rows then.
    module, losses = Averaged(batch_norm=kind != "stochastic"), Losses()
    strategy = make_strategy(mesh, {"plan": "fsdp", "save_distributed_checkpoint": folder}) if mesh else None
    module.train_dataloader = module.val_dataloader = lambda: module.loader(
        *((strategy.mesh.data_parallel_rank, strategy.mesh.data_parallel_size) if strategy else (0, 1))
    )
    ranks = dist.get_world_size() if mesh else 1
    saver = SavesAfter(path, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        averages = _callback(kind)
        trainer = make_trainer(strategy, ranks, max_epochs=3, callbacks=[losses, averages, saver])
        trainer.fit(module, ckpt_path=path if resume else None)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    copied = averages._average_model
    return {
        "losses": losses.values,
        "marks": [getattr(parameter, "mark", 0.0) for parameter in copied.parameters()],
        "average": [full(parameter).clone() for parameter in copied.parameters()],
        "types": {type(parameter.data).__name__: 0.0 for parameter in copied.parameters()},
        "val": float(trainer.callback_metrics["val"]),
        "state": {name: full(value).clone() for name, value in state.items()},
    }


class SavesAfter(Callback):
    """Saves when an epoch has been trained."""

    def __init__(self, path: str | None, epoch: int) -> None:
        self.path, self.epoch = path, epoch

    def on_train_epoch_start(self, trainer, pl_module):
        if self.path is not None and trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


KINDS = ["ema", "mean", "no buffers", "stochastic"]
CASES = [(kind, mesh) for kind in KINDS for mesh in ("1", "2", "2x2")]


@pytest.mark.parametrize(
    ("kind", "mesh"), tiered(CASES, lambda case: case[1] == "2" and case[0] in ("ema", "stochastic"))
)
def test_averages_are_those_of_one_device(kind: str, mesh: str, worlds: Worlds) -> None:
    expected = fit(kind, None, None, False, False)
    for seen in worlds({"1": 1, "2": 2, "2x2": 4}[mesh]).run(fit, kind, MESHES[mesh], None, False, False):
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("folder", tiered([False, True], lambda folder: folder))
@pytest.mark.parametrize("kind", tiered(["ema", "no buffers"], "ema".__eq__))
def test_averages_are_saved_and_resumed(kind: str, folder: bool, worlds: Worlds, tmp_path: Path) -> None:
    path, plain = str(tmp_path / "run.ckpt"), str(tmp_path / "plain.ckpt")
    fit(kind, None, plain, False, False)
    expected = fit(kind, None, plain, True, False)
    worlds(2).run(fit, kind, MESHES["2"], path, False, folder)
    assert Path(path).is_dir() == folder
    for seen in worlds(2).run(fit, kind, MESHES["2"], path, True, folder):
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)
