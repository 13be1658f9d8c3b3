"""A plan that was found for a world that is not there trains, from its file, as one device does."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from lightning_autoparallel import AutoParallelStrategy
from lightning_autoparallel.config import PlanSpec
from lightning_autoparallel.plan import integer_programme, memory_room
from lightning_autoparallel.strategy.fake_world import PlanningStrategy
from lightning_autoparallel.strategy.planning import planning_trainer, run_planning
from tests.distributed.jobs import Net, Validated, assert_equals_one_device, make_trainer, train
from tests.support.slow_memory import SLOW_MEMORY
from tests.support.worlds import Worlds


class Attends(nn.Module):
    """A block with attention over a few tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(x)))


class Found(Net):
    """Four equal blocks over six tokens, each made of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Linear(1, 16))
        self.layers, self.head = nn.Sequential(*(Attends(16, 4) for _ in range(4))), nn.Linear(16, 3)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.layers(self.net(x)).mean(1)), y)


def find(mesh: Mapping[str, int], folder: Path, kind: type[Net] = Found) -> PlanSpec:
    """Plan for a world of as many ranks, and read what was written."""
    size = math.prod(mesh.values())
    strategy = PlanningStrategy(
        world_size=size, mesh=dict(mesh), plan="auto", hardware=dict(SLOW_MEMORY), dump_dir=str(folder)
    )
    torch.manual_seed(0)
    module = kind()
    shards = size // mesh["tp"]
    module.train_dataloader = lambda: module.loader(0, shards)  # type: ignore[method-assign]
    run_planning(planning_trainer(strategy, {"max_epochs": 1}, Trainer), module, None)
    return PlanSpec.parse(str(folder / "training_step" / "plan.json"))


def fit(mesh: Mapping[str, int], plan: str) -> Any:
    class Planned(Found):
        strategy: ClassVar[Mapping[str, Any]] = {"plan": plan, "hardware": dict(SLOW_MEMORY)}

    return train(Planned, mesh, math.prod(mesh.values()))


@pytest.mark.parametrize(
    "mesh",
    [{"dp_shard": 2, "tp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.matrix)],
    ids=lambda mesh: "x".join(mesh),
)
def test_what_is_found_trains_as_one_device(mesh: Mapping[str, int], worlds: Worlds, tmp_path: Path) -> None:
    spec = find(mesh, tmp_path)
    cut = [rule.key for rule in spec.rules if any(text != "R" for _, text in rule.placements)]
    assert any("layers.*" in key for key in cut), spec.rules
    ranks = math.prod(mesh.values())
    assert_equals_one_device(worlds(ranks).run(fit, mesh, spec.file), train(Found, None))


@pytest.mark.parametrize(
    "mesh",
    [
        {"dp_shard": 2, "tp": 2},
        pytest.param({"tp": 2}, marks=pytest.mark.matrix),
        pytest.param({"dp_shard": 2}, marks=pytest.mark.matrix),
        pytest.param({"dp_replicate": 2, "dp_shard": 2}, marks=pytest.mark.matrix),
        pytest.param({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, marks=pytest.mark.matrix),
    ],
    ids=lambda mesh: "x".join(mesh),
)
def test_a_training_finds_its_plan_at_the_first_step(mesh: Mapping[str, int], worlds: Worlds) -> None:
    """After the evaluation before it, for which parameters lay elsewhere."""
    assert_equals_one_device(worlds(math.prod(mesh.values())).run(fit, mesh, "auto"), train(Found, None))


class Mixed(nn.Module):
    """A block whose parameters' names end as those of the layers around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Around(Validated):
    """Layers and blocks in one sequence; the validation looks at a weight as no shard of it can be looked at."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "auto", "hardware": dict(SLOW_MEMORY)}

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), Mixed(), nn.Linear(16, 16), Mixed(), nn.Linear(16, 3))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        weights = self.net[2].weight, self.net[1].up.weight
        self.log("largest", sum(torch.linalg.svdvals(weight)[0] for weight in weights))


def test_names_of_one_kind_within_another_and_steps_that_compute_otherwise(worlds: Worlds) -> None:
    mesh = {"tp": 2}
    assert_equals_one_device(worlds(2).run(train, Around, mesh, 2), train(Around, None))


def fit_around(mesh: Mapping[str, int], plan: str) -> Any:
    class Planned(Around):
        strategy: ClassVar[Mapping[str, Any]] = {**Around.strategy, "plan": plan}

    return train(Planned, mesh, 2)


def test_what_a_file_says_was_found_binds_no_other_step(worlds: Worlds, tmp_path: Path) -> None:
    mesh = {"tp": 2}
    spec = find(mesh, tmp_path, Around)
    assert spec.found and any(text != "R" for rule in spec.rules for _, text in rule.placements)
    ranks = worlds(2).run(fit_around, mesh, spec.file)
    assert_equals_one_device(ranks, train(Around, None))
    assert ranks[0].said("validation_step computes with whole parameters") == 1


def evaluate_what_is_left() -> tuple[float, float]:
    """A value of one device's, and that of a strategy which is given shards that another has left."""

    class Left(Around):
        strategy: ClassVar[Mapping[str, Any]] = {**Around.strategy, "leave_sharded": True}

    module = Left()
    torch.manual_seed(0)
    trainer = make_trainer(AutoParallelStrategy(mesh={"tp": 2}, **Left.strategy), 2, max_steps=2)
    trainer.fit(module, module.loader(0, 1), module.loader(0, 1))
    whole = Around()
    whole.load_state_dict({name: value.full_tensor() for name, value in module.state_dict().items()})
    expected = float(torch.linalg.svdvals(whole.net[2].weight)[0] + torch.linalg.svdvals(whole.net[1].up.weight)[0])
    trainer = make_trainer(AutoParallelStrategy(mesh={"tp": 2}, **Around.strategy), 2)
    trainer.validate(module, module.loader(0, 1), verbose=False)
    return expected, float(trainer.callback_metrics["largest"])


def test_shards_that_another_strategy_has_left_are_moved(worlds: Worlds) -> None:
    for expected, found in worlds(2).run(evaluate_what_is_left):
        assert found == pytest.approx(expected, rel=1e-5)


class Spectral(Found):
    """Multiplies complex matrices, of which no hardware's peak is known."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "auto", "hardware": dict(SLOW_MEMORY)}

    def loss(self, batch: Any) -> torch.Tensor:
        up, down = (each.weight.to(torch.complex64) for each in (self.layers[0].up, self.layers[0].down))
        return super().loss(batch) + (down @ up).abs().mean()

    def on_train_end(self) -> None:
        reports = getattr(self.trainer.strategy, "reports", {})
        warnings.warn("; ".join(note for report in reports.values() for note in report.notes), stacklevel=1)


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}], ids=lambda mesh: "x".join(mesh))
def test_products_without_a_known_peak_are_planned_all_the_same(mesh: Mapping[str, int], worlds: Worlds) -> None:
    ranks = worlds(2).run(train, Spectral, mesh, 2)
    assert_equals_one_device(ranks, train(Spectral, None))
    assert ranks[0].said("no peak for some products: taken in complex64 to be as fast as in float32") == 1


class HoldsMemory(Found):
    """Changes a weight by the memory that it had before the first step; rank 0 holds another's."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "auto", "hardware": dict(SLOW_MEMORY)}

    def on_fit_start(self) -> None:
        self.held = [self.layers[0].up.weight.data]
        if self.trainer.global_rank == 0:
            self.alone = self.head.weight.detach()

    def on_train_batch_end(self, *args: Any) -> None:
        self.held[0].mul_(0.5)  # the weight itself, by its other name

    def on_train_end(self) -> None:
        reports = getattr(self.trainer.strategy, "reports", {})
        warnings.warn("; ".join(note for report in reports.values() for note in report.notes), stacklevel=1)


class HoldsWhatIsCutTwice(HoldsMemory):
    """By tp, which computes with it so, and inside of that by dp_shard: in blocks."""

    strategy: ClassVar[Mapping[str, Any]] = {
        "plan": {"rules": {"layers.*.up.weight": {"tp": "S(0)"}}},
        "hardware": dict(SLOW_MEMORY),
    }


def fit_and_hold(kind: type[HoldsMemory], mesh: Mapping[str, int]) -> Any:
    return train(kind, mesh, math.prod(mesh.values()))


@pytest.mark.parametrize("kind", [HoldsMemory, HoldsWhatIsCutTwice])
def test_parameters_whose_memory_is_held_stay_where_they_are(kind: type[HoldsMemory], worlds: Worlds) -> None:
    ranks = worlds(4).run(fit_and_hold, kind, {"dp_shard": 2, "tp": 2})
    assert_equals_one_device(ranks, train(kind, None))
    assert ranks[0].said("head.weight stay where they were") == 1


class GradientOfOne(Found):
    """Before the first step one rank has a gradient that no other has; the step sets it to None."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "auto", "hardware": dict(SLOW_MEMORY)}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and self.global_step == 0:
            self.head.weight.grad = torch.zeros_like(self.head.weight)

    def on_train_end(self) -> None:
        reports = getattr(self.trainer.strategy, "reports", {})
        warnings.warn("; ".join(note for report in reports.values() for note in report.notes), stacklevel=1)


def fit_with_a_gradient_of_one(mesh: Mapping[str, int]) -> Any:
    return train(GradientOfOne, mesh, math.prod(mesh.values()))


def test_a_gradient_that_one_rank_has_hangs_nobody(worlds: Worlds) -> None:
    ranks = worlds(4).run(fit_with_a_gradient_of_one, {"dp_shard": 2, "tp": 2})
    assert_equals_one_device(ranks, train(GradientOfOne, None))
    assert ranks[0].said("head.weight stay where they were") == 1
    assert ranks[0].said("not all ranks have a gradient of them") == 1


class Unfreezes(Net):
    """Layers that fit a rank whole while they are frozen, and do not with their gradients and an optimizer's state."""

    epochs = 2
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "auto", "memory_budget_gib": 0.045}

    def __init__(self) -> None:
        super().__init__()
        wide = (nn.Linear(1024, 1024, bias=False).requires_grad_(False) for _ in range(3))
        self.net = nn.Sequential(nn.Linear(6, 1024), *wide, nn.Linear(1024, 3))

    def on_train_epoch_start(self) -> None:
        self.net.requires_grad_(self.current_epoch == 1)
        self.net[4].requires_grad_(True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-3)


def test_what_takes_more_than_was_planned_for_is_told(worlds: Worlds) -> None:
    ranks = worlds(2).run(train, Unfreezes, {"dp_shard": 2}, 2)
    assert_equals_one_device(ranks, train(Unfreezes, None), tolerance=1e-4)
    assert ranks[0].said("GiB of a rank as it is now, of 0.045 that it may use: other parameters are trained") == 1


def fit_without_time(mesh: Mapping[str, int]) -> Any:
    def late(problem: Any, *options: Any, **more: Any) -> Any:
        return integer_programme.solve(problem, time_limit_s=0.0)

    with mock.patch.object(memory_room, "solve", late):
        return fit(mesh, "auto")


def test_a_solver_without_time_ends_no_training(worlds: Worlds) -> None:
    ranks = worlds(2).run(fit_without_time, {"tp": 2})
    assert_equals_one_device(ranks, train(Found, None))
    assert ranks[0].said("plan 'auto' was not found in time for training_step") == 1
