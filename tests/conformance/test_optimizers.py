"""Every optimizer of torch updates shards as it updates the parameters of one device, its state included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_autoparallel.torch_compat.tree import tree_map
from tests.distributed.jobs import MESH, Net, Uneven, assert_equals_one_device, failure, train
from tests.numerics.training import full
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance

MESHES: dict[str, tuple[int, Mapping[str, int], Mapping[str, Any]]] = {
    "fsdp": (2, MESH, {"plan": "fsdp"}),
    "ddp": (2, MESH, {"plan": "ddp"}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}, {"plan": "hsdp"}),
    "tp": (
        4,
        {"dp_shard": 2, "tp": 2},
        {"plan": {"base": "fsdp", "rules": {"net.0.weight": {"tp": "S(0)"}, "net.2.weight": {"tp": "S(1)"}}}},
    ),
}


class Normed(Optimizer):
    """As people write them: a trust ratio of norms, momentum in a tensor of its own, ``.data``, a running maximum."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[p]
                if not state:
                    state.update(step=0, momentum=torch.zeros(p.shape), most=0.0)
                state["step"] += 1
                state["momentum"].mul_(0.9).add_(p.grad.data, alpha=0.1)
                state["most"] = max(state["most"], p.grad.abs().max().item())
                ratio = p.data.norm() / (state["momentum"].norm() + 1e-6)
                update = state["momentum"] / (state["most"] * p.numel() ** 0.5)
                p.data = p.data - group["lr"] * ratio.clamp(max=10.0) * update
        return loss


class Whitened(Normed):
    """A product of whole matrices decides."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for p in (p for p in self.param_groups[0]["params"] if p.grad is not None and p.dim() == 2):
            left = torch.linalg.eigh(p.grad @ p.grad.T + torch.eye(p.shape[0]))[0]
            p.sub_(p.grad / left.max(), alpha=0.1)
        return loss


class Noisy(Normed):
    """Draws as Langevin dynamics does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p), alpha=0.01)
        return loss


class OneOf(Uneven):
    """Trains by one optimizer."""

    make: ClassVar[Callable[..., Optimizer]]
    matrices = False
    steps = 5

    def configure_optimizers(self):
        torch.manual_seed(5)
        chosen = [p for p in self.parameters() if p.dim() == 2 or not self.matrices]
        self.optimizer = type(self).make(chosen)
        return self.optimizer

    def extra(self) -> Any:
        state = [{"of": tuple(p.shape), **kept} for p, kept in self.optimizer.state.items()]
        return tree_map(lambda leaf: full(leaf).clone() if isinstance(leaf, Tensor) else leaf, state)


SETTINGS: dict[str, Mapping[str, Any]] = {
    "Adadelta": {},
    "Adafactor": {"lr": 0.05, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.1},
    "Adam": {"lr": 0.02, "eps": 1e-2, "amsgrad": True},
    "Adamax": {"lr": 0.02, "eps": 1e-2},
    "AdamW": {"lr": 0.02, "eps": 1e-2},
    "ASGD": {"t0": 2},
    "NAdam": {"lr": 0.02, "eps": 1e-2},
    "RAdam": {"lr": 0.02, "eps": 1e-2},
    "RMSprop": {"lr": 0.02, "eps": 1e-2, "centered": True, "momentum": 0.5},
    "Rprop": {"lr": 0.01},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
}
FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
OTHERS: dict[str, tuple[Any, Mapping[str, Any], bool]] = {
    "Muon": (torch.optim.Muon, {"lr": 0.05}, True),
    "Muon, by rms": (torch.optim.Muon, {"lr": 0.05, "adjust_lr_fn": "match_rms_adamw", "nesterov": False}, True),
    "LBFGS": (torch.optim.LBFGS, {"lr": 0.5, "max_iter": 4}, False),
    "LBFGS, searching": (torch.optim.LBFGS, {"max_iter": 3, "line_search_fn": "strong_wolfe"}, False),
    "own, by norms": (Normed, {}, False),
    "own, by matrices": (Whitened, {}, False),
    "own, by chance": (Noisy, {}, False),
}


def optimizers() -> Iterator[tuple[str, Any, Mapping[str, Any], bool]]:
    """A name, the class, its arguments, whether it takes matrices only."""
    for name, settings in SETTINGS.items():
        for foreach in (None, True, False):
            yield f"{name}, foreach {foreach}", getattr(torch.optim, name), {**settings, "foreach": foreach}, False
    for name in FUSED:
        yield f"{name}, fused", getattr(torch.optim, name), {**SETTINGS[name], "fused": True}, False
    for name, (made_by, settings, matrices) in OTHERS.items():
        yield name, made_by, settings, matrices


KINDS = {
    name: {"make": staticmethod(partial(made_by, **settings)), "matrices": matrices}
    for name, made_by, settings, matrices in optimizers()
}
# Of small gradients an update's sign is decided by what is rounded.
TOLERANCE = {name: 2e-3 for name in KINDS if name.startswith("LBFGS")}
QUICK = ("Adafactor, foreach None", "Rprop, foreach True", "SGD, fused", "Muon", "LBFGS", "own, by norms")
CASES = [(name, where) for name in KINDS for where in MESHES]


def trained(name: str, mesh: Mapping[str, int] | None, world: int, options: Mapping[str, Any]) -> Any:
    """Trains with one optimizer."""
    return train(type(name, (OneOf,), {**KINDS[name], "strategy": options}), mesh, world)


@pytest.mark.parametrize(("name", "where"), tiered(CASES, lambda case: case[0] in QUICK and case[1] == "fsdp"))
def test_updates_are_those_of_one_device(name: str, where: str, worlds: Worlds) -> None:
    world, mesh, options = MESHES[where]
    expected = trained(name, None, 1, {})
    outcomes = worlds(world).run(trained, name, mesh, world, options)
    tolerance = TOLERANCE.get(name, 2e-5)
    assert_equals_one_device(outcomes, expected, tolerance)
    assert expected.extra
    for outcome in outcomes:
        torch.testing.assert_close(outcome.extra, expected.extra, rtol=10 * tolerance, atol=max(tolerance / 10, 1e-6))


class SharesOutItself(Net):
    def configure_optimizers(self):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1)


def test_an_optimizer_that_shares_out_its_state_is_refused(worlds: Worlds) -> None:
    for message, _ in worlds(2).run(failure, SharesOutItself):
        assert message.startswith("ConfigError: ZeroRedundancyOptimizer")
