"""Lightning's lifecycle around the steps is that of one device."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader

from tests.distributed.jobs import MESH, Net, assert_equals_one_device, make_strategy, make_trainer, train
from tests.numerics.training import local_rows
from tests.support.worlds import Worlds


class Validated(Net):
    """Logs a loss while training, validating and testing; predicts classes."""

    epochs = 2
    steps = 2

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("test", self.loss(batch))

    def predict_step(self, batch):
        scores = self.net(batch[0])
        as_long = self.net[0].weight.flatten()[: self.rows] * 1  # as long as the batch, and none of it
        return {"scores": scores, "columns": scores.t(), "as_long": as_long, "mean": scores.mean()}

    def val_dataloader(self):
        return self.train_dataloader()


HOOKS = sorted(
    name
    for name, _ in inspect.getmembers(LightningModule, inspect.isfunction)
    if name.startswith("on_") or name in ("setup", "teardown", "configure_model", "optimizer_step")
)


class Traced(Validated):
    """Notes every hook of the module and of a callback."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []
        for name in HOOKS:
            if not name.startswith(("on_before_batch", "on_after_batch")):  # the sample batch passes them once more
                setattr(self, name, self._noting(name, getattr(self, name)))

    def _noting(self, name: str, original: Any) -> Any:
        def hook(*args: Any, **kwargs: Any) -> Any:
            self.called.append(f"module.{name}")
            return original(*args, **kwargs)

        hook.__signature__ = inspect.signature(original)  # Lightning looks at it
        return hook

    def callbacks(self):
        class Notes(Callback):
            """Notes its hooks."""

        for name in dir(Callback):
            if name.startswith("on_") or name in ("setup", "teardown"):
                note = lambda callback, *_, name=name, **__: self.called.append(f"callback.{name}")  # noqa: E731
                setattr(Notes, name, note)
        return [Notes()]

    def extra(self):
        return self.called


def test_the_order_of_hooks(worlds: Worlds) -> None:
    expected = train(Traced, None).extra
    assert len(expected) > 60
    for outcome in worlds(2).run(train, Traced, MESH):
        assert outcome.extra == expected


class Scheduled(Validated):
    steps = 4

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Clipped(Scheduled):
    trainer_options: ClassVar = {"gradient_clip_val": 0.1}


class Accumulated(Scheduled):
    trainer_options: ClassVar = {"accumulate_grad_batches": 2}


class SecondOptimizerGroup(Scheduled):
    def configure_optimizers(self):
        groups = [{"params": self.net[0].parameters(), "lr": 0.01}, {"params": self.net[2].parameters()}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("kind", [Validated, Scheduled, Accumulated, Clipped, SecondOptimizerGroup])
@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
def test_training_and_validation_equal_one_device(kind, plan, worlds: Worlds) -> None:
    outcomes = worlds(2).run(train_planned, kind, plan)
    assert_equals_one_device(outcomes, train(kind, None))


def train_planned(kind: type[Net], plan: str) -> Any:
    return train(type(kind.__name__, (kind,), {"strategy": {"plan": plan}}), MESH)


def evaluate(mesh: dict[str, int] | None, fit_first: bool) -> dict[str, Any]:
    """Validate, test and predict with one Trainer, after fitting or without."""
    torch.manual_seed(0)
    module = Validated()
    strategy = make_strategy(mesh, {}) if mesh is not None else None
    trainer = make_trainer(strategy, 1 if mesh is None else 2, max_epochs=1)

    def loader() -> DataLoader:
        rank, shards = (strategy.mesh.data_parallel_rank, strategy.mesh.data_parallel_size) if strategy else (0, 1)
        return DataLoader([local_rows(batch, rank, shards) for batch in module.batches()], batch_size=None)

    for name in ("train", "val", "test", "predict"):
        setattr(module, f"{name}_dataloader", loader)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if fit_first:
            trainer.fit(module)
        validated = trainer.validate(module, verbose=False)
        tested = trainer.test(module, verbose=False)
        predicted = trainer.predict(module)
        if fit_first:
            trainer.fit_loop.max_epochs = 2
            trainer.fit(module)  # and training goes on
    return {"validated": validated, "tested": tested, "predicted": predicted, "step": trainer.global_step}


@pytest.mark.parametrize("fit_first", [True, False])
def test_evaluation(fit_first, worlds: Worlds) -> None:
    expected = evaluate(None, fit_first)
    ranks = worlds(2).run(evaluate, MESH, fit_first)
    for rank, result in enumerate(ranks):
        assert result["step"] == expected["step"]
        for name in ("validated", "tested"):
            torch.testing.assert_close(result[name], expected[name], rtol=1e-5, atol=1e-7)
        for ours, theirs in zip(result["predicted"], expected["predicted"], strict=True):
            torch.testing.assert_close(ours["scores"], theirs["scores"].chunk(2)[rank], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(ours["columns"], ours["scores"].t())
            torch.testing.assert_close(ours["as_long"], theirs["as_long"], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(ours["mean"], theirs["mean"], rtol=1e-5, atol=1e-6)
