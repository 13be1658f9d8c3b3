"""Eager code on sharded parameters gives what it gives on plain ones, and its changes stay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.mesh import build_mesh
from lightning_autoparallel.pipeline.agreement import ControlGroup
from lightning_autoparallel.pipeline.whole_parameters import WholeParameters
from tests.support.worlds import Worlds

Code = Callable[[nn.Module, Tensor], object]


def _assigns_data(module, x):
    module.weight.data = module.weight.data * 0.5 + 1


def _blends(module, x):
    module.weight.data.mul_(0.9).add_(module.other.data, alpha=0.1)


def _copies_plain(module, x):
    with torch.no_grad():
        module.weight.copy_(torch.arange(15.0).view(5, 3))


def _broadcasts(module, x):
    with torch.no_grad():
        module.weight *= torch.tensor([1.0, 2.0, 3.0])


def _sets_rows(module, x):
    with torch.no_grad():
        module.weight[1:3] = 7.0


def _renormalises(module, x):
    with torch.no_grad():
        module.weight.renorm_(2, 0, 0.5)


def _zeroes_a_row_of_a_view(module, x):
    with torch.no_grad():
        module.weight[1].zero_()
        module.other.copy_(module.weight * 2)


def _scales_a_reshaped_alias(module, x):
    module.weight.data.view(-1)[3:6].mul_(4.0)


def _copies_what_one_rank_lacks(module, x):
    with torch.no_grad():
        module.bias.copy_(module.bias * module.one.detach() - module.another.detach())


def _adds_to_itself_then_reads(module, x):
    with torch.no_grad():
        module.weight.addmm_(module.weight, torch.eye(3))
        module.weight.copy_(module.weight + 1)


CHANGES = [
    _zeroes_a_row_of_a_view,
    _scales_a_reshaped_alias,
    _adds_to_itself_then_reads,
    _copies_what_one_rank_lacks,
    *[_assigns_data, _blends, _copies_plain, _broadcasts, _sets_rows, _renormalises],
]
LOSSES: list[Code] = [
    lambda module, x: (module.one * 2 + module.another * 3).sum() * x.mean(),  # one rank holds nothing of either
    lambda module, x: F.linear(x, module.weight, module.bias).pow(2).sum(),
    lambda module, x: sum(p.pow(2).sum() for p in module.parameters()) * x.mean(),
    lambda module, x: (x @ module.weight.T).sum() + module.weight[0].norm(),
    lambda module, x: torch.cat([module.weight.flatten(), module.bias]).std() * x[0, 0],
    lambda module, x: F.linear(x, nn.Parameter(module.weight.detach()), module.bias).pow(2).sum(),
    lambda module, x: torch.stack([p.detach().norm() for p in module.parameters()]).sum() * module.bias.mean(),
]


def _module() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Module()
    module.weight, module.other = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(5, 3))
    module.bias = nn.Parameter(torch.randn(5))
    module.one, module.another = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(1))
    return module


def _rows(rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def _sharded(world: int, sharded: bool) -> tuple[nn.Module, WholeParameters]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = build_mesh(MeshSpec.from_mapping({"dp_shard": world}), "cpu")
    module = _module()
    for name, parameter in list(module.named_parameters()):
        placements = [Shard(0) if sharded else Replicate()]
        setattr(module, name, nn.Parameter(distribute_tensor(parameter.data, mesh.device_mesh, placements)))
    return module, WholeParameters(module, mesh, ControlGroup(timedelta(seconds=60)))


def changed(index: int, sharded: bool) -> dict[str, Tensor]:
    """The parameters after one change."""
    module, whole = _sharded(torch.distributed.get_world_size(), sharded)
    with whole:
        CHANGES[index](module, _rows(0))
    assert isinstance(module.weight, DTensor)
    return {name: parameter.detach().full_tensor() for name, parameter in module.named_parameters()}


def gradients(index: int, sharded: bool) -> dict[str, Tensor | None]:
    """Whole gradients of one loss on this rank's rows; the loss uses what it reads twice."""
    module, whole = _sharded(torch.distributed.get_world_size(), sharded)
    with whole:
        loss = LOSSES[index](module, _rows(torch.distributed.get_rank()))
        (loss + 0.5 * LOSSES[index](module, _rows(5))).backward()
    return {name: None if p.grad is None else p.grad.full_tensor() for name, p in module.named_parameters()}


@pytest.mark.parametrize("index", range(len(CHANGES)), ids=lambda i: CHANGES[i].__name__)
def test_changes_reach_the_shards(index: int, worlds: Worlds) -> None:
    expected = _module()
    CHANGES[index](expected, _rows(0))
    pairs = zip(expected.parameters(), _module().parameters(), strict=True)
    assert not all(torch.equal(now, before) for now, before in pairs)
    for sharded in (True, False):
        for found in worlds(2).run(changed, index, sharded):
            torch.testing.assert_close(found, {name: p.detach() for name, p in expected.named_parameters()})


@pytest.mark.parametrize("index", range(len(LOSSES)))
def test_gradients_are_the_mean_over_ranks(index: int, worlds: Worlds) -> None:
    module = _module()
    for rank in range(2):
        (0.5 * (LOSSES[index](module, _rows(rank)) + 0.5 * LOSSES[index](module, _rows(5)))).backward()
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    for sharded in (True, False):
        for found in worlds(2).run(gradients, index, sharded):
            torch.testing.assert_close(found, expected)


def asked_gradients(sharded: bool) -> list[Tensor]:
    """What ``torch.autograd.grad`` gives for a parameter in use and one that is not, and ``backward`` of one alone."""
    module, whole = _sharded(torch.distributed.get_world_size(), sharded)
    with whole:
        loss = F.linear(_rows(torch.distributed.get_rank()), module.weight, module.bias).pow(2).sum()
        used, unused = torch.autograd.grad(
            loss, [module.weight, module.other], retain_graph=True, materialize_grads=True
        )
        loss.backward(inputs=[module.bias])
    assert module.weight.grad is None
    return [gradient.full_tensor() for gradient in (used, unused, module.bias.grad)]


def test_asked_gradients_are_the_mean_over_ranks(worlds: Worlds) -> None:
    module = _module()
    loss = sum(F.linear(_rows(rank), module.weight, module.bias).pow(2).sum() for rank in range(2)) / 2
    weight, bias = torch.autograd.grad(loss, [module.weight, module.bias])
    for sharded in (True, False):
        for found in worlds(2).run(asked_gradients, sharded):
            torch.testing.assert_close(found, [weight, torch.zeros(5, 3), bias])


def read_between(sharded: bool) -> list[Tensor]:
    """The gradient and the weight as the step reads them around two backwards; a hook updates one parameter in each."""
    module, whole = _sharded(torch.distributed.get_world_size(), sharded)
    return _read_between(module, _rows(torch.distributed.get_rank()), whole)


def _read_between(module: nn.Module, x: Tensor, mode: contextlib.AbstractContextManager[object]) -> list[Tensor]:
    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad)
            parameter.grad = None

    seen = []
    module.other.register_post_accumulate_grad_hook(update)
    with mode:
        for scale in (1.0, 2.0):
            loss = F.linear(x, module.weight * module.other).sum() * scale
            (loss.backward if scale == 1.0 else partial(torch.autograd.backward, loss))()
            seen += [module.weight.grad.clone() * 1.0, module.other.detach() * 1.0]
    return seen


def test_what_is_read_between_two_backwards_is_what_it_is_then(worlds: Worlds) -> None:
    x = sum(_rows(rank) for rank in range(2)) / 2
    expected = _read_between(_module(), x, contextlib.nullcontext())
    assert not torch.equal(expected[0], expected[2]) and not torch.equal(expected[1], expected[3])
    for sharded in (True, False):
        for found in worlds(2).run(read_between, sharded):
            torch.testing.assert_close(found, expected)
