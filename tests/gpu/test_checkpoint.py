"""Saved on a GPU and resumed there, with and without us: the run of one that never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.jobs import Net, make_strategy, make_trainer
from tests.numerics.training import full

pytestmark = pytest.mark.gpu

HALF, ALL = 3, 6


class Stateful(Net):
    """Epochs of one batch, as Lightning goes on with an epoch in an order of its own, and an optimizer with state."""

    steps = 1

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def went(
    ours: bool, accelerator: str, until: int, load: str | None, save: str | None, folder: bool
) -> dict[str, Tensor]:
    """Train until a step, from a checkpoint or from the start, and save."""
    torch.manual_seed(0)
    module = Stateful()
    options = {"compile": True, "save_distributed_checkpoint": folder}
    strategy = make_strategy({"dp_shard": 1}, options) if ours else None
    module.train_dataloader = lambda: module.loader(0, 1)
    trainer = make_trainer(strategy, 1, accelerator=accelerator, max_steps=until, max_epochs=-1)
    trainer.fit(module, ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    assert trainer.global_step == until
    return {name: full(parameter) for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(
    ("first", "second", "folder"),
    [(True, True, False), (True, True, True), (True, False, False), (False, True, False)],
    ids=["ours", "ours in a folder", "ours, resumed without", "without, resumed by ours"],
)
def test_a_run_goes_on(first: bool, second: bool, folder: bool, accelerator: str, gpu_world, tmp_path: Path):
    path = str(tmp_path / "run.ckpt")
    whole = gpu_world().run(went, False, accelerator, ALL, None, None, False)[0]
    half = gpu_world().run(went, first, accelerator, HALF, None, path, folder)[0]
    assert Path(path).is_dir() == folder
    assert any(not torch.allclose(half[name], whole[name], rtol=0, atol=1e-4) for name in whole)
    resumed = gpu_world().run(went, second, accelerator, ALL, path, None, False)[0]
    torch.testing.assert_close(resumed, whole, rtol=0, atol=1e-5)
