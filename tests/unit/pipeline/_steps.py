"""Steps of hand-made modules, run by an engine in a world of one and plainly, side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autoparallel.capture import NoEffects
from lightning_autoparallel.config import EngineConfig, MeshSpec
from lightning_autoparallel.mesh import build_mesh
from lightning_autoparallel.pipeline import ControlGroup, StepCall, StepEngine
from lightning_autoparallel.pipeline.stages import StageContext
from lightning_autoparallel.torch_compat.collectives import init_fake_world

STEPS = 6


class Net(nn.Module):
    """``step(x, i)`` is the step; ``between(i)`` runs in front of it, outside of any capture."""

    training_step = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def loss(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()

    def step(self, x: Any, i: int) -> Any:
        return self.loss(x)

    def between(self, i: int) -> None:
        """What hooks and callbacks do."""

    def batch(self, i: int) -> Any:
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(i))

    def seen(self) -> Any:
        """What is compared besides results, after all steps."""
        return None


@dataclass
class Told:
    """What the engine said, and how often it captured."""

    warnings: list[str] = field(default_factory=list)

    @property
    def captures(self) -> int:
        return 1 + sum("captured again" in warning for warning in self.warnings)


def run_plainly(module: Net, steps: int = STEPS) -> list[Any]:
    """Results and gradients of every step in plain Python."""
    return [_one(module, lambda i=i: module.step(module.batch(i), i), i) for i in range(steps)]


def run_captured(module: Net, told: Told, steps: int = STEPS, **config: Any) -> list[Any]:
    """The same by an engine."""
    init_fake_world(1)
    try:
        mesh = build_mesh(MeshSpec.from_mapping({"dp_shard": 1}), "cpu")
        context = StageContext(
            mesh=mesh,
            config=EngineConfig(compile=False, **config),
            control=ControlGroup(timedelta(minutes=1)),
            warn=told.warnings.append,
        )
        engine = StepEngine(module=module, context=context, device=torch.device("cpu"))
        engine.shard_parameters()
        call = StepCall(
            name="step",
            run=lambda batch, watcher: module.step(batch, watcher.value("i")),
            effects=lambda watcher: NoEffects(),
            training=True,
            loss_leaf=lambda output: output["loss"] if isinstance(output, dict) else output,
        )
        return [
            _one(module, lambda i=i: engine.execute(call, module.batch(i), {"i": i}).output, i) for i in range(steps)
        ]
    finally:
        dist.destroy_process_group()


def _one(module: Net, run: Callable[[], Any], i: int) -> Any:
    module.between(i)
    module.zero_grad()
    output = run()
    (output["loss"] if isinstance(output, dict) else output).backward()
    gradients = [None if p.grad is None else p.grad for p in module.parameters()]
    return [plain(output)] + [
        None if g is None else plain(getattr(g, "full_tensor", lambda g=g: g)()) for g in gradients
    ]


def plain(value: Any) -> Any:
    """A value that later steps do not change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else copy.copy(value)


def assert_equal(one: Any, other: Any) -> None:
    """Equal plain values, tensors to rounding."""
    assert type(one) is type(other), f"{one!r} is no {other!r}"
    if isinstance(one, Tensor):
        torch.testing.assert_close(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other), f"{one!r} is as long as {other!r}"
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    elif isinstance(one, float):
        assert one == other or abs(one - other) < 1e-6 * abs(other)
    else:
        assert one == other
