"""Rates move as on one device: by step, epoch and plateau, by hooks, in groups, with optimizers made anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, StochasticWeightAveraging
from torch import nn
from torch.optim import lr_scheduler

from tests.distributed.jobs import MESH, Net, assert_equals_one_device, failure, make_strategy, make_trainer, train
from tests.numerics.training import full
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance


class Rated(Net):
    """Logs its rates, validates; `extra` is what the optimizer's groups hold at the end."""

    epochs = 3
    trainer_options: ClassVar[Mapping[str, Any]] = {"accumulate_grad_batches": 2}

    def callbacks(self):
        return [LearningRateMonitor(log_momentum=True)]

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def val_dataloader(self):
        return self.trainer.train_dataloader

    def optimizer(self, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **{"lr": 0.05, "eps": 0.1, **options})

    def configure_optimizers(self):
        return [self.optimizer()], [{"scheduler": self.scheduler(self.optimizer()), "interval": "step"}]

    def extra(self) -> Any:
        found = self.trainer.optimizers
        return [{k: v for k, v in group.items() if k != "params"} for one in found for group in one.param_groups]


class ByStep(Rated):
    def configure_optimizers(self):
        optimizer = self.optimizer()
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ByEpoch(Rated):
    def configure_optimizers(self):
        optimizer = self.optimizer()
        warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=1)
        then = lr_scheduler.CosineAnnealingLR(optimizer, 3)
        return [optimizer], [lr_scheduler.SequentialLR(optimizer, [warm, then], [1])]


class ByPlateau(Rated):
    """Both a logged training loss and a validation loss decide."""

    monitored = "val_loss"

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = self.optimizer(lr=1.0)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": self.monitored, "frequency": 1},
        }


class ByTrainingPlateau(ByPlateau):
    monitored = "train_loss"


class Groups(Rated):
    """Groups with rates of their own, one of which is frozen first; a scheduler with a function for each."""

    def configure_optimizers(self):
        head, body = list(self.net[2].parameters()), list(self.net[0].parameters())
        groups = [{"params": body, "lr": 0.01, "weight_decay": 0.1}, {"params": head}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        functions = [lambda step: float(step > 2), lambda step: 0.9**step]
        return [optimizer], [{"scheduler": lr_scheduler.LambdaLR(optimizer, functions), "interval": "step"}]


class GrowsGroups(Rated):
    """A group is added, and the rate and decay of another changed, in the second epoch."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net[2].parameters(), lr=0.05, eps=0.1)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            (optimizer,) = self.trainer.optimizers
            optimizer.param_groups[0].update(lr=0.01, weight_decay=0.2)
            optimizer.add_param_group({"params": self.net[0].parameters(), "lr": 0.02})


class WarmsUp(Rated):
    """Sets the rate in `optimizer_step`, as in Lightning's documentation."""

    def configure_optimizers(self):
        return self.optimizer()

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (self.trainer.global_step + 1) / 5) * 0.05
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        for parameter in self.parameters():
            parameter.grad = None


class SkipsSteps(Rated):
    """Every other optimizer step runs the closure alone: what it gave adds up."""

    def configure_optimizers(self):
        return self.optimizer()

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if self.trainer.current_epoch == 1:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class OwnSchedule(Rated):
    """No scheduler of torch: `lr_scheduler_step` is overridden."""

    class Halves:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def advance(self, metric: Any) -> None:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Nothing is kept."""

        step = advance

    def configure_optimizers(self):
        optimizer = self.optimizer()
        return [optimizer], [{"scheduler": self.Halves(optimizer), "interval": "epoch"}]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.advance(metric)


class MadeInInit(Rated):
    """Made before the parameters lie in shards, after a step, which left state."""

    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.AdamW([{"params": self.net[0].parameters(), "lr": 0.01}], lr=0.05, eps=0.1)
        self.early.add_param_group({"params": self.net[2].parameters()})
        self.loss(self.batches()[0]).backward()
        self.early.step()
        self.early.zero_grad()

    def configure_optimizers(self):
        return self.early


class MadeInSetup(Rated):
    def setup(self, stage: str) -> None:
        self.early = self.optimizer()
        self.rate = lr_scheduler.StepLR(self.early, 1, gamma=0.5)

    def configure_optimizers(self):
        return [self.early], [self.rate]


class MadeInInitAndHeld(Rated):
    """Is never given to Lightning: the module steps it by itself."""

    trainer_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.early = torch.optim.AdamW(self.parameters(), lr=0.05, eps=0.1)

    def configure_optimizers(self):
        return None

    def training_step(self, batch, batch_idx):
        self.early.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.early.step()

    def extra(self) -> Any:
        return None


class Manual(Rated):
    """Two optimizers and their schedulers, by hand."""

    trainer_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        first = torch.optim.AdamW(self.net[0].parameters(), lr=0.05, eps=0.1)
        second = torch.optim.SGD(self.net[2].parameters(), lr=0.1, momentum=0.5)
        return [first, second], [lr_scheduler.StepLR(first, 2), lr_scheduler.ExponentialLR(second, 0.9)]

    def training_step(self, batch, batch_idx):
        for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            scheduler.step()
            self.untoggle_optimizer(optimizer)


class Averaged(Rated):
    """Weights are averaged, and the rate annealed, from the second epoch on."""

    trainer_options: ClassVar[Mapping[str, Any]] = {}

    def callbacks(self):
        return [StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1)]

    def configure_optimizers(self):
        return self.optimizer()


class ChangesWeights(Rated):
    """Weights are assigned to after steps, in every way."""

    def configure_optimizers(self):
        return self.optimizer()

    def on_train_batch_end(self, *args: Any) -> None:
        self.net[0].weight.data = self.net[0].weight.data * 0.9
        self.net[2].weight.data = torch.clamp(self.net[2].weight, -0.3, 0.3)
        self.net[0].bias.data.clamp_(-0.2, 0.2)
        with torch.no_grad():
            self.net[2].bias.mul_(0.9)


KINDS = (
    *(ByStep, ByEpoch, ByPlateau, ByTrainingPlateau, Groups, GrowsGroups, WarmsUp, SkipsSteps, OwnSchedule),
    *(MadeInInit, MadeInSetup, MadeInInitAndHeld, Manual, Averaged, ChangesWeights),
)
MESHES: dict[str, tuple[int, Mapping[str, int], Mapping[str, Any]]] = {
    "fsdp": (2, MESH, {"plan": "fsdp"}),
    "ddp": (2, MESH, {"plan": "ddp"}),
    "forward": (2, MESH, {"capture": "forward"}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}, {"plan": "hsdp"}),
}
CASES = [(kind, where) for kind in KINDS for where in MESHES]
QUICK = {ByPlateau, GrowsGroups, MadeInInit, MadeInInitAndHeld}


def trained(kind: type[Net], mesh: Mapping[str, int] | None, world: int, options: Mapping[str, Any]) -> Any:
    """Trains with options of the strategy."""
    return train(type(kind.__name__, (kind,), {"strategy": options}), mesh, world)


@pytest.mark.parametrize(("kind", "where"), tiered(CASES, lambda case: case[0] in QUICK and case[1] == "fsdp"))
def test_rates_move_as_on_one_device(kind: type[Net], where: str, worlds: Worlds) -> None:
    expected = trained(kind, None, 1, {})
    world, mesh, options = MESHES[where]
    outcomes = worlds(world).run(trained, kind, mesh, world, options)
    for outcome in outcomes:
        assert outcome.extra == expected.extra
        if where == "forward" or kind in (Manual, MadeInInitAndHeld):  # losses of steps are those of the rank's rows
            torch.testing.assert_close(outcome.parameters, expected.parameters, rtol=1e-5, atol=1e-6)
    if where != "forward" and kind not in (Manual, MadeInInitAndHeld):
        assert_equals_one_device(outcomes, expected)


class Foreign(Net):
    """Trains a tensor that is no parameter of the module's."""

    def configure_optimizers(self):
        self.__dict__["outside"] = nn.Parameter(torch.zeros(3))
        return torch.optim.SGD([*self.parameters(), self.outside], lr=0.1)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x) + self.__dict__["outside"], y)


def test_parameters_of_nobody_are_refused(worlds: Worlds) -> None:
    for message, _ in worlds(2).run(failure, Foreign):
        assert message.startswith("ConfigError: SGD trains a tensor")


def resumed(path: str, folder: bool) -> dict[str, Any]:
    """Parameters of a module that optimizes by itself, after an epoch that starts from a checkpoint of another."""
    _one_epoch(path, folder, None)
    return _one_epoch(path, folder, path)


def _one_epoch(path: str, folder: bool, start: str | None) -> dict[str, Any]:
    torch.manual_seed(0)
    module = MadeInInitAndHeld()
    strategy = make_strategy(MESH, {"plan": "fsdp", "save_distributed_checkpoint": folder})
    trainer = make_trainer(strategy, 2, max_epochs=1 if start is None else 2)
    module.train_dataloader = lambda: module.loader(strategy.mesh.data_parallel_rank, 2)
    trainer.fit(module, ckpt_path=start)
    trainer.save_checkpoint(path)
    return {name: full(parameter) for name, parameter in module.named_parameters()}


@pytest.mark.matrix
@pytest.mark.parametrize("folder", [False, True])
def test_a_module_without_optimizers_is_saved_and_resumed(folder: bool, worlds: Worlds, tmp_path: Any) -> None:
    one, other = worlds(2).run(resumed, str(tmp_path / "run"), folder)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
