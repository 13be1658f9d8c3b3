"""Gradients of several micro-batches add up as on one device, and are reduced once where that was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor

from lightning_autoparallel import AutoParallelStrategy
from lightning_autoparallel.callbacks import CollectiveMonitor
from lightning_autoparallel.errors import ConfigError
from tests.distributed.jobs import MESH, Net, Outcome, Uneven, assert_equals_one_device, train
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance


class Accumulated(Uneven):
    """Windows of three micro-batches, the last one of two; rows that divide by nothing, a scalar."""

    steps = 8
    epochs = 2
    trainer_options: ClassVar[Mapping[str, Any]] = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-1)


class Scheduled(Accumulated):
    """One micro-batch, then two, then four, then one again."""

    epochs = 4
    trainer_options: ClassVar[Mapping[str, Any]] = {}

    def callbacks(self):
        return [GradientAccumulationScheduler({0: 1, 1: 2, 2: 4, 3: 1})]


class Zeroed(Accumulated):
    """Gradients stay, as zeros."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


class Skipping(Accumulated):
    """The last micro-batch of a window is skipped, and a whole window."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return None if batch_idx in (2, 6, 7) else loss


class Watched(Accumulated):
    """Gradients are looked at, and changed, after each micro-batch."""

    def on_after_backward(self):
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm())
        self.net[0].weight.grad.clamp_(-0.02, 0.02)
        self.net[2].bias.grad[1] = 0.01


class Hooked(Accumulated):
    """Hooks are given the gradient of each micro-batch."""

    def on_train_start(self):
        self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        self.net[2].weight.register_post_accumulate_grad_hook(_halve)


def _halve(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


class Frozen(Accumulated):
    """Parameters are frozen, and thawed, in the middle of windows."""

    def on_train_batch_start(self, batch, batch_idx):
        self.net[2].weight.requires_grad_(batch_idx not in (1, 4))


class InBfloat16(Accumulated):
    """A fused optimizer is clipped, which Lightning does not do on one device."""

    trainer_options: ClassVar[Mapping[str, Any]] = {**Accumulated.trainer_options, "precision": "bf16-mixed"}
    fused = False

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-1, fused=self.fused)


class Validated(Accumulated):
    """Validates, and counts losses, in the middle of windows; stops in one."""

    trainer_options: ClassVar[Mapping[str, Any]] = {
        "accumulate_grad_batches": 3,
        "val_check_interval": 2,
        "max_steps": 4,
    }

    def validation_step(self, batch, batch_idx):
        self.log("validated", self.loss(batch))

    def val_dataloader(self):
        return self.trainer.train_dataloader


class Manual(Accumulated):
    """Two optimizers, two backwards for each step, of which all but the last wait."""

    trainer_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        head = list(self.net[4].parameters())
        body = [*self.net[0].parameters(), *self.net[2].parameters(), self.scale]
        return torch.optim.AdamW(body, lr=0.05, eps=0.1), torch.optim.SGD(head, lr=0.1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        is_last = batch_idx % 2 == 1
        with first.toggle_model(sync_grad=False):
            self.manual_backward(self.loss(batch) / 2)
        with first.toggle_model(sync_grad=is_last):
            self.manual_backward(self.loss(batch) / 2)
            if is_last:
                self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                first.step()
                first.zero_grad()
        with second.toggle_model():
            self.manual_backward(self.loss(batch))
            second.step()
            second.zero_grad(set_to_none=False)


class Uncaptured(Accumulated):
    """A part of the network looks at values, and runs its own code."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.net[1](self.net[0](x))
        if float(hidden.detach().sum()) > 1e9:
            return hidden.sum()
        beside = F.linear(hidden, self.net[0].weight.sum(1))  # of a parameter that a captured call reads, too
        return F.cross_entropy(self.net[2:](hidden) * self.scale + beside[:, None] * x[:, :3], y)


MESHES: dict[str, tuple[int, Mapping[str, int], Mapping[str, Any]]] = {
    "ddp": (2, MESH, {"plan": "ddp"}),
    "fsdp": (2, MESH, {"plan": "fsdp"}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}, {"plan": "hsdp"}),
    "tp": (
        4,
        {"dp_shard": 2, "tp": 2},
        {"plan": {"base": "fsdp", "rules": {"net.0.weight": {"tp": "S(0)"}, "net.2.weight": {"tp": "S(1)"}}}},
    ),
}
POLICIES = ("auto", True, False)
KINDS = (Accumulated, Scheduled, Zeroed, Skipping, Watched, Hooked, Frozen, InBfloat16, Validated, Manual, Uncaptured)
CASES = [(kind, where, policy) for kind in KINDS for where in MESHES for policy in POLICIES]
QUICK = {(Accumulated, "ddp", "auto"), (Zeroed, "fsdp", False), (Manual, "ddp", "auto"), (Watched, "fsdp", False)}


def trained(kind: type[Net], where: str | None, policy: Any) -> Outcome:
    """Trains with a policy."""
    if where is None:
        return train(kind, None)
    world, mesh, options = MESHES[where]
    chosen = {"fused": True, "strategy": {**options, "reduce_every_micro_batch": policy}}
    return train(type(kind.__name__, (kind,), chosen), mesh, world)


@pytest.mark.parametrize(("kind", "where", "policy"), tiered(CASES, QUICK.__contains__))
def test_accumulation_is_that_of_one_device(kind: type[Net], where: str, policy: Any, worlds: Worlds) -> None:
    expected = trained(kind, None, policy)
    outcomes = worlds(MESHES[where][0]).run(trained, kind, where, policy)
    if kind in (Manual, Uncaptured, InBfloat16, Skipping):  # their losses are of a rank's rows, or rounded, or none
        tolerance = 4e-3 if kind is InBfloat16 else 1e-5
        for outcome in outcomes:
            torch.testing.assert_close(outcome.parameters, expected.parameters, rtol=tolerance, atol=tolerance / 10)
        return
    assert_equals_one_device(outcomes, expected)


class Counted(Accumulated):
    """Windows of three micro-batches, seven in an epoch; what each of them launches."""

    steps = 7
    trainer_options: ClassVar[Mapping[str, Any]] = {"accumulate_grad_batches": 3}

    def __init__(self) -> None:
        super().__init__()
        self.monitor = CollectiveMonitor()

    def callbacks(self):
        return [self.monitor]

    def extra(self) -> Any:
        reports = self.trainer.strategy.reports
        return {
            "launches": [sum(step.values()) for step in self.monitor.launches],
            "predicted": {name: sum(report.launches().values()) for name, report in reports.items()},
            "notes": [note for note in reports["training_step"].notes if "accumulated gradients" in note],
        }


STEPS_IN_WINDOWS = (2, 5, 6, 9, 12, 13)  # after which the optimizer steps


@pytest.mark.parametrize(
    ("where", "policy"),
    tiered(
        [(where, policy) for where in MESHES for policy in POLICIES], {("ddp", "auto"), ("fsdp", False)}.__contains__
    ),
)
def test_gradients_are_reduced_as_often_as_was_asked_for(where: str, policy: Any, worlds: Worlds) -> None:
    for outcome in worlds(MESHES[where][0]).run(trained, Counted, where, policy):
        launches, predicted = outcome.extra["launches"], outcome.extra["predicted"]
        at_steps = {launches[i] for i in STEPS_IN_WINDOWS}
        between = {count for i, count in enumerate(launches) if i not in STEPS_IN_WINDOWS}
        step, reduction = predicted["training_step"], predicted.get("gradient_reduction", 0)
        assert between == {step} and at_steps == {step + reduction}
        assert not outcome.said("did not launch the collectives")
        logged = [row["autoparallel/predicted_launches/total"] for row in outcome.logged]
        assert logged == [row["autoparallel/launches/total"] for row in outcome.logged]
        if policy is True:
            assert not outcome.extra["notes"] and not reduction
            continue
        assert len(outcome.extra["notes"]) == 1 and reduction > 0
        if where == "ddp":
            assert step <= 2  # sums of the loss and of what it divides by
        if policy is False:
            assert "reduced in every micro-batch" not in outcome.extra["notes"][0]


def test_another_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="reduce_every_micro_batch='never'"):
        AutoParallelStrategy(reduce_every_micro_batch="never")
