"""One module in the hands of several Trainers: each finds it where the last one left it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.distributed.jobs import MESH, Net, make_strategy, make_trainer
from tests.support.worlds import Worlds


class Linear(Net):
    """Wrong shapes between layers would be an error; here they would be other classes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 4)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))


def trained_in_turn(mesh: Mapping[str, int] | None, plan: str, by_hand: bool) -> list[float]:
    """Losses of validations: one Trainer leaves shards, another, or the user, makes them whole, the first goes on."""
    torch.manual_seed(0)
    module = Linear()
    loader = module.loader(dist.get_rank(), 2) if mesh else module.loader(0, 1)
    module.train_dataloader = module.val_dataloader = lambda: loader

    def trainer(**options: Any) -> Any:
        strategy = make_strategy(mesh, {"plan": plan, "compile": False, **options}) if mesh else None
        return make_trainer(strategy, 2 if mesh else 1, limit_val_batches=0)

    first, second = trainer(leave_sharded=True), trainer()
    first.fit(module)
    if by_hand:
        for parameter in [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]:
            name = next(name for name, value in module.net.named_parameters() if value is parameter)
            setattr(module.net, name, nn.Parameter(parameter.full_tensor().detach()))
    else:
        second.fit(module)
    found = []
    for _ in range(2):
        first.limit_val_batches = 1.0
        found += [first.validate(module, loader, verbose=False)[0]["val"]]
        first.limit_val_batches = 0
        first.fit_loop.max_epochs += 1
        first.fit(module)
    return found


@pytest.mark.parametrize(("plan", "by_hand"), [("fsdp", False), ("fsdp", True), ("ddp", False)])
def test_a_module_that_another_made_whole_is_sharded_anew(plan: str, by_hand: bool, worlds: Worlds) -> None:
    expected = trained_in_turn(None, plan, by_hand)
    for found in worlds(2).run(trained_in_turn, MESH, plan, by_hand):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def left_in_shards(mesh: Mapping[str, int]) -> list[bool]:
    """Whether each parameter that a training left in shards is the same object behind a validation, and in shards."""
    module = Linear()
    plan = {"base": "fsdp", "rules": {"net.*": {"tp": "S(0)"}}} if "tp" in mesh else "fsdp"
    strategy = make_strategy(mesh, {"plan": plan, "compile": False, "leave_sharded": True})
    trainer = make_trainer(strategy, 4, limit_val_batches=0)
    module.train_dataloader = lambda: module.loader(strategy.mesh.data_parallel_rank, strategy.mesh.data_parallel_size)
    trainer.fit(module)
    before, trainer.limit_val_batches = list(module.parameters()), 1.0
    trainer.validate(module, module.train_dataloader(), verbose=False)
    pairs = zip(before, module.parameters(), strict=True)
    return [isinstance(parameter, DTensor) and parameter is old for old, parameter in pairs]


@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}])
def test_what_was_left_in_shards_stays_where_it_is(mesh: dict[str, int], worlds: Worlds) -> None:
    assert worlds(4).run(left_in_shards, mesh) == [[True, True]] * 4


class ReadsLater(Net):
    """In the middle of a second training a batch's loss is read, from which on its own code logs."""

    steps = 4
    goes_on = reads = False

    def on_train_batch_start(self, batch, batch_idx):
        self.reads = self.goes_on and batch_idx >= 2

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.reads:
            assert loss.item() > 0
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch[0]))
        self.log("rows", float(len(batch[0])), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        return loss


def logged_twice(mesh: Mapping[str, int] | None) -> list[dict[str, float]]:
    """Epoch values of two trainings with one Trainer."""
    torch.manual_seed(0)
    module = ReadsLater()
    strategy = make_strategy(mesh, {"plan": "fsdp", "compile": False}) if mesh else None
    trainer = make_trainer(strategy, 2 if mesh else 1)
    loader = module.loader(dist.get_rank(), 2) if mesh else module.loader(0, 1)
    found = []
    for module.goes_on in (False, True):
        trainer.fit(module, loader)
        trainer.fit_loop.max_epochs += 1
        found.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    assert strategy is None or strategy.modes["training_step"] == "forward"
    return found


def test_values_of_an_epoch_are_joined_as_the_step_said_in_an_earlier_run(worlds: Worlds) -> None:
    expected = logged_twice(None)
    for found in worlds(2).run(logged_twice, MESH):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
