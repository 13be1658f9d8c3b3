"""Parameters move into other shards as the objects that they are, and with them gradients and an optimizer's state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_autoparallel.apply import lie_anew, parameter_layouts, shard_module
from lightning_autoparallel.config import MeshSpec, PlanSpec
from lightning_autoparallel.mesh import build_mesh
from lightning_autoparallel.plan.parameter_storage import place_parameters
from lightning_autoparallel.plan.planner import plan_axes
from tests.support.worlds import Worlds

CPU = torch.device("cpu")
FIRST = {"*": {"tp": "R"}, "stored:*": {"dp_shard": "S(0)", "tp": "S(0)"}}
# Columns that tp computes with, cut inside of them; one parameter whole everywhere.
FOUND = {
    "*": {"tp": "S(0)"},
    "2.bias": {"tp": "R"},
    "stored:*.weight": {"dp_shard": "S(0)"},
    "stored:2.bias": {"dp_shard": "R"},
}


def layouts_of(rules: Any, module: nn.Module, mesh: Any) -> Any:
    spec = PlanSpec.parse({"base": "ddp", "rules": rules})
    axes = plan_axes(spec, mesh)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    placed = place_parameters(spec, shapes, axes)
    return parameter_layouts(module, mesh.mesh_of(axes), axes, {name: p.storage for name, p in placed.items()})


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def moved() -> list[tuple[str, bool, bool, list[bool]]]:
    """For each parameter: placements, whether it is the same object, has the same values, and whether its state has."""
    mesh = build_mesh(MeshSpec.from_mapping({"dp_shard": 2, "tp": 2}), "cpu")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))  # 5: padded at first
    again = {**FOUND, "2.weight": {"tp": "R"}, "stored:2.weight": {"dp_shard": "S(1)"}}
    later = layouts_of(again, module, mesh)
    shard_module(module, layouts_of(FIRST, module, mesh), CPU)
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter) * 0.5
    optimizer.step()
    kept = [[whole(v).clone() for v in optimizer.state[p].values()] for p in module.parameters()]
    before = [(parameter, whole(parameter).clone()) for parameter in module.parameters()]
    lie_anew([module], later, [optimizer])
    found = []
    for (name, parameter), (old, value), states in zip(module.named_parameters(), before, kept, strict=True):
        now = [whole(state) for state in optimizer.state[parameter].values()]
        lying = {str(state.placements) for state in optimizer.state[parameter].values() if isinstance(state, DTensor)}
        assert lying == {str(parameter.placements)}, name
        for each in (parameter, parameter.grad, *optimizer.state[parameter].values()):
            local = each.to_local() if isinstance(each, DTensor) else each
            assert local.untyped_storage().nbytes() == local.nbytes, f"{name} holds more than it is"
        alike = [torch.equal(a, b) for a, b in zip(now, states, strict=True)]
        found.append((str(parameter.placements), old is parameter, torch.equal(whole(parameter), value), alike))
        assert torch.equal(whole(parameter.grad), torch.full_like(value, 0.5)), name
    optimizer.step()  # with what has moved
    return found


def test_everything_moves_and_stays_what_it_is(worlds: Worlds) -> None:
    for rank in worlds(4).run(moved):
        assert all(same and equal and all(states) for _, same, equal, states in rank), rank
        assert len({placements for placements, *_ in rank}) >= 3, rank


def moved_to_another_mesh() -> list[bool]:
    """Whether each parameter lies on the other mesh, as its rules say, with its values."""
    torch.manual_seed(0)
    module = nn.Linear(6, 8)
    meshes = [build_mesh(MeshSpec.from_mapping({axis: 2}), "cpu") for axis in ("dp_shard", "tp")]
    rules = [{"stored:*": {"dp_shard": "S(0)"}}, {"*": {"tp": "S(0)"}}]
    first, later = (layouts_of(each, module, mesh) for each, mesh in zip(rules, meshes, strict=True))
    shard_module(module, first, CPU)
    values = [whole(parameter).clone() for parameter in module.parameters()]
    lie_anew([module], later, [])
    pairs = zip(module.named_parameters(), values, strict=True)
    return [p.device_mesh == later[name].mesh and torch.equal(whole(p), value) for (name, p), value in pairs]


def test_equal_placements_on_another_mesh_are_other_shards(worlds: Worlds) -> None:
    assert worlds(2).run(moved_to_another_mesh) == [[True, True]] * 2
