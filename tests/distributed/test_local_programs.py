"""Calls of single modules as local programs: values are each rank's own, gradients of parameters those of DDP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_autoparallel.capture import NoEffects
from lightning_autoparallel.config import EngineConfig, MeshSpec, PlanSpec
from lightning_autoparallel.mesh import build_mesh
from lightning_autoparallel.pipeline import ControlGroup, StepCall, StepEngine
from lightning_autoparallel.pipeline.stages import StageContext
from tests.numerics.training import full
from tests.support.worlds import Worlds

MESHES = {2: {"dp_shard": 2}, 4: {"dp_replicate": 2, "dp_shard": 2}}


class Body(nn.Module):
    """Batch norm over a rank's rows, two heads, and a scalar on the side."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.scores, self.extra = nn.Linear(10, 3), nn.Linear(10, 2)

    def forward(self, x: Tensor, *, weight: float = 1.0, mask: Tensor | None = None) -> dict[str, Any]:
        h = F.gelu(self.norm(self.first(x)))
        return {
            "scores": self.scores(h),
            "extra": self.extra(h) * weight,
            "penalty": h.square().mean(),
            "best": h.argmax(-1),
            "mask": mask,
            "rows": x.shape[0],
        }


class Net(nn.Module):
    """A stem whose output goes, through code that is not captured, into a body that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6))
        self.body = Body()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)


Caller = Callable[..., Any]


def loss_of(call: Caller, x: Tensor, mask: Tensor) -> Tensor:
    h = call("stem", x)
    assert h.requires_grad
    one = call("body", h * 2, mask=mask)
    two = call("body", x[:, :1] + h, weight=0.5)
    assert one["rows"] == len(x) and one["mask"] is mask and not one["best"].requires_grad
    # The second call's scores are read by nobody, its third head is.
    return one["scores"].square().sum() + one["penalty"] + two["extra"].sum() + call("frozen", one["scores"]).mean()


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def rows(shard: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(shard)
    return torch.randn(4, 5, generator=generator), torch.ones(4)


def engine_of(module: nn.Module, mesh: Mapping[str, int], plan: Any = "fsdp", compile: bool = False) -> StepEngine:
    """An engine around ``module``, its parameters sharded."""
    built = build_mesh(MeshSpec.from_mapping(mesh), "cpu")
    config = EngineConfig(plan=PlanSpec.parse(plan), compile=compile)
    control = ControlGroup(timedelta(minutes=2))
    context = StageContext(mesh=built, config=config, control=control, warn=lambda message: None)
    engine = StepEngine(module=module, context=context, device=torch.device("cpu"))
    engine.shard_parameters()
    return engine


def caller(engine: StepEngine) -> Caller:
    """Calls submodules of the engine's module as local programs."""

    def call(path: str, *args: Any, **kwargs: Any) -> Any:
        owner = engine.module.get_submodule(path)
        step = StepCall(
            name=f"step:{path}",
            run=lambda batch, watcher: owner(*batch[0], **batch[1]),
            effects=lambda watcher: NoEffects(),
            training=True,
            local=True,
            path=path,
        )
        return engine.execute(step, (args, kwargs), {}).output

    return call


def plain(module: nn.Module) -> Caller:
    """Calls submodules as they are."""
    return lambda path, *args, **kwargs: module.get_submodule(path)(*args, **kwargs)


def check_step(mesh: Mapping[str, int], plan: Any, compile: bool) -> None:
    """Loss, gradients and buffers of one step against those of eager modules, gradients averaged by hand."""
    reference = made()
    engine = engine_of(made(), mesh, plan, compile)
    parallel = engine.context.mesh
    shard, shards = parallel.data_parallel_rank, parallel.data_parallel_size
    x, mask = rows(shard)
    expected = loss_of(plain(reference), x, mask)
    expected.backward()
    loss = loss_of(caller(engine), x, mask)
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    copies = dist.get_world_size() // shards
    for name, parameter in reference.named_parameters():
        found = engine.module.get_parameter(name)
        if parameter.grad is None:
            assert found.grad is None, name
            continue
        dist.all_reduce(parameter.grad)
        assert isinstance(found.grad, DTensor) and found.grad.placements == found.placements
        # That of the bias ahead of the batch norm is nothing but what is rounded.
        torch.testing.assert_close(full(found.grad), parameter.grad / shards / copies, rtol=1e-5, atol=5e-6, msg=name)
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(engine.module.get_buffer(name), buffer)
    assert set(engine.reports) == {"step:stem", "step:body", "step:frozen"}


@pytest.mark.parametrize("plan", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_a_step_of_module_calls(size, plan, worlds: Worlds) -> None:
    worlds(size).run(check_step, MESHES[size], plan, False)


def test_compiled_calls(worlds: Worlds) -> None:
    worlds(2).run(check_step, MESHES[2], "fsdp", True)


RULES = {
    "base": "fsdp",
    "rules": {
        "body.first.weight": {"tp": "S(0)"},
        "body.first.bias": {"tp": "S(0)"},
        "body.norm.*": {"tp": "S(0)"},
        "body.scores.weight": {"tp": "S(1)"},
        "body.extra.weight": {"tp": "S(1)"},
    },
}


@pytest.mark.matrix
def test_rules_on_another_axis(worlds: Worlds) -> None:
    worlds(4).run(check_step, {"dp_shard": 2, "tp": 2}, RULES, False)
