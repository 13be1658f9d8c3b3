"""Gradients that hooks clip, change or look at by torch's own functions are those of one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from tests.distributed.jobs import MESH, Net, assert_equals_one_device, train
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance


class Hooked(Net):
    """Rows that divide by nothing and more ranks than some have; every limit is passed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.lone = nn.Parameter(torch.ones(1, 3))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x) * self.scale + self.lone, y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-1)


def _clip(**options: Any) -> Callable[[Any], Any]:
    return lambda self: torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1, **options)


def _set_value(self: Any) -> None:
    torch.nn.utils.clip_grad_value_(self.parameters(), 0.02)


def _replace(self: Any) -> None:
    for parameter in self.parameters():
        parameter.grad = torch.tanh(parameter.grad * 3)


def _add_plain(self: Any) -> None:
    for parameter in self.parameters():
        parameter.grad += torch.full(parameter.shape, 0.01)
        parameter.grad = parameter.grad - 0.1 * parameter


def _give_plain(self: Any) -> None:
    for parameter in self.parameters():
        parameter.grad = torch.linspace(0, 1, parameter.numel()).reshape(parameter.shape)


def _write_in_part(self: Any) -> None:
    self.net[0].weight.grad[1:3] = 0
    self.net[2].weight.grad[:, 0].mul_(2)
    self.net[0].bias.grad.data.view(-1)[2] = 1.0


def _drop(self: Any) -> None:
    self.net[0].weight.grad = None
    self.net[2].bias.grad.zero_()


def _center(self: Any) -> None:
    for parameter in (p for p in self.parameters() if p.dim() > 1):
        parameter.grad.sub_(parameter.grad.mean(dim=1, keepdim=True))


def _normalise_all(self: Any) -> None:
    grads = [parameter.grad for parameter in self.parameters()]
    total = torch.nn.utils.get_total_norm(grads)
    torch.nn.utils.clip_grads_with_norm_(list(self.parameters()), 0.05, total)
    self.log("total", total)


def _log_norms(self: Any) -> None:
    self.log_dict(grad_norm(self, norm_type=2))
    self.log("largest", max(float(parameter.grad.abs().max()) for parameter in self.parameters()))
    self.log("any", float(any(bool((parameter.grad > 0.05).any()) for parameter in self.parameters())))


def _own_norm(self: Any) -> None:
    norm = torch.stack([parameter.grad.detach().norm(2) for parameter in self.parameters()]).norm(2)
    for parameter in self.parameters():
        parameter.grad.mul_((0.1 / (norm + 1e-6)).clamp(max=1.0))


def _flat(self: Any) -> None:
    flat = torch.cat([parameter.grad.flatten() for parameter in self.parameters()])
    self.log("flat", flat.norm())
    scale, at = 0.1 / flat.norm(), 0
    for parameter in self.parameters():
        parameter.grad.copy_(scale * flat[at : at + parameter.numel()].view_as(parameter))
        at += parameter.numel()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "clip_grad_norm_": _clip(),
    "by the largest": _clip(norm_type=float("inf")),
    "by the sum": _clip(norm_type=1.0, error_if_nonfinite=True),
    "one by one": _clip(foreach=False),
    "together": _clip(foreach=True),
    "clip_grad_value_": _set_value,
    "replaced": _replace,
    "plain tensors added": _add_plain,
    "plain tensors given": _give_plain,
    "written in part": _write_in_part,
    "dropped": _drop,
    "centered": _center,
    "in two calls": _normalise_all,
    "looked at": _log_norms,
    "by hand": _own_norm,
    "end to end": _flat,
}
HOOKS = ("on_before_optimizer_step", "on_after_backward", "configure_gradient_clipping")
MESHES: dict[str, tuple[int, Mapping[str, int], Mapping[str, Any]]] = {
    "fsdp": (2, MESH, {"plan": "fsdp"}),
    "ddp": (2, MESH, {"plan": "ddp"}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}, {"plan": "hsdp"}),
    "four": (4, {"dp_shard": 4}, {"plan": "fsdp"}),
    "forward": (2, MESH, {"capture": "forward"}),
}


def trained(change: str, hook: str, mesh: Mapping[str, int] | None, world: int, options: Mapping[str, Any]) -> Any:
    """Trains with gradients changed in one hook."""

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        CHANGES[change](self)

    return train(type("Changed", (Hooked,), {hook: run, "strategy": options}), mesh, world)


CASES = [(change, hook, where) for change in CHANGES for hook in HOOKS for where in MESHES]
QUICK = {("written in part", HOOKS[0], "fsdp"), ("clip_grad_norm_", HOOKS[2], "fsdp"), ("looked at", HOOKS[1], "fsdp")}
QUICK |= {("end to end", HOOKS[1], "fsdp")}


@pytest.mark.parametrize(("change", "hook", "where"), tiered(CASES, QUICK.__contains__))
def test_changed_gradients_are_those_of_one_device(change: str, hook: str, where: str, worlds: Worlds) -> None:
    expected = trained(change, hook, None, 1, {})
    world, mesh, options = MESHES[where]
    outcomes = worlds(world).run(trained, change, hook, mesh, world, options)
    if where == "forward":  # where the loss is that of the rank's rows
        for outcome in outcomes:
            torch.testing.assert_close(outcome.parameters, expected.parameters, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(outcome.logged, expected.logged, rtol=1e-5, atol=1e-6)
        return
    assert_equals_one_device(outcomes, expected)


class Groups(Hooked):
    """Each group of parameters has its own limit."""

    trainer_options: ClassVar[Mapping[str, Any]] = {"precision": "bf16-mixed"}

    def configure_optimizers(self):
        groups = [{"params": [self.scale, self.lone], "lr": 0.01}, {"params": self.net.parameters(), "limit": 0.05}]
        return torch.optim.AdamW(groups, lr=0.05, eps=1e-1)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], group.get("limit", 0.1))
        self.clip_gradients(optimizer, gradient_clip_val=0.03, gradient_clip_algorithm="value")


def test_groups_have_limits_of_their_own(worlds: Worlds) -> None:
    expected = train(Groups, None)
    for outcome in worlds(2).run(train, Groups, MESH):
        torch.testing.assert_close(outcome.parameters, expected.parameters, rtol=4e-3, atol=4e-3)
