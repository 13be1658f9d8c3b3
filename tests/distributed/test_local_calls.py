"""What calls of single modules may do, and what they may not, on several ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autoparallel.errors import CaptureError, RanksDifferError
from tests.distributed.test_local_programs import MESHES, caller, engine_of, plain
from tests.numerics.training import full
from tests.support.worlds import Worlds

Forward = Callable[..., Any]


class Calls(nn.Module):
    """A module that does what it is told to."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self._run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, *args, **kwargs)


def around(forward: Forward) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"net": Calls(forward), "other": nn.Linear(4, 4)})


def mine(rows: int = 3) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(dist.get_rank()))


def raised(run: Callable[[], Any]) -> str:
    """The kind of error that a call raises, and its text."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def moments(module: Calls, x: Tensor) -> Tensor:
    """Reads a buffer, then changes it."""
    h = module.linear(x) * (module.seen.clone() + 1)
    with torch.no_grad():
        module.seen.mul_(0.5).add_(h.mean(0))
    return h


def penalty(call: Forward, x: Tensor) -> Tensor:
    """A loss with the square of a gradient in it."""
    given = x.clone().requires_grad_()
    scores = call("net", given)
    (gradient,) = torch.autograd.grad(scores.sum(), given, create_graph=True)
    return scores.mean() + (gradient.norm(dim=1) - 1).square().mean()


def curved(module: Calls, x: Tensor) -> Tensor:
    return torch.tanh(module.linear(x)) @ module.linear.weight


def several(module: Calls, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reads a buffer and changes it, and returns three tensors of the same shape."""
    hidden = torch.tanh(module.linear(x) * (module.seen.clone() + 1))
    with torch.no_grad():
        module.seen.add_(hidden.mean(0))
    return hidden * hidden.roll(1, 1), hidden.exp(), hidden.sin()


def penalty_of_one(call: Forward, x: Tensor) -> Tensor:
    """The square of the first result's gradient, beside losses of the others."""
    given = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(call("net", given)[0].sum(), given, create_graph=True)
    first, second, third = call("net", x)
    return (gradient.norm(dim=1) - 1).square().mean() + first.mean() + second.mean() - third.mean()


def of_one(module: Calls, x: Tensor) -> Tensor:
    return several(module, x)[0]


def counting(module: Calls, x: Tensor) -> Tensor:
    """Writes an attribute, which its own code run again would write again."""
    module.calls = getattr(module, "calls", 0) + 1
    return torch.tanh(module.linear(x)) * module.calls


def in_its_mode(module: Calls, x: Tensor) -> Tensor:
    return torch.tanh(module.linear(x)) * (2.0 if module.training else 1.0)


def with_its_rate(module: Calls, x: Tensor) -> Tensor:
    return torch.tanh(module.linear(x)) * module.rate


def tied(module: Calls, x: Tensor) -> Tensor:
    return module.linear(x)


def compare(forward: Forward, loss_of: Callable[[Forward, Tensor], Tensor]) -> None:
    """Gradients and buffers of two steps against those of eager modules."""
    root = around(forward)
    reference = copy.deepcopy(root)
    engine = engine_of(root, MESHES[2])
    for _ in range(2):
        expected, loss = loss_of(plain(reference), mine()), loss_of(caller(engine), mine())
        torch.testing.assert_close(loss.detach(), expected.detach())
        expected.backward()
        loss.backward()
    for name, parameter in reference.named_parameters():
        found = engine.module.get_parameter(name).grad
        if parameter.grad is None:
            assert found is None, name
            continue
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(full(found), parameter.grad / 2, rtol=1e-5, atol=1e-6, msg=name)
    for name, buffer in reference.named_buffers():
        torch.testing.assert_close(engine.module.get_buffer(name), buffer)


def check_second_order() -> None:
    compare(curved, penalty)


def check_second_order_beside_a_buffer() -> None:
    """The buffer is an output of the graph, before the results; one that is differentiated alone, too."""
    compare(several, penalty_of_one)
    compare(of_one, penalty)


def check_what_is_others_by_then() -> None:
    """The module's own code runs for gradients of gradients: later, and a second time."""

    def refusal(forward: Forward, meanwhile: Callable[[nn.Module], None], rate: float = 2.0) -> str:
        root = around(forward)
        root["net"].rate = rate
        call, given = caller(engine_of(root, MESHES[2])), mine().requires_grad_()
        scores = call("net", given)
        meanwhile(root["net"])
        return raised(lambda: torch.autograd.grad(scores.sum(), given, create_graph=True))

    def slower(module: nn.Module) -> None:
        module.rate = 1.0

    def nothing(module: nn.Module) -> None:
        """All is as it was."""

    for forward, meanwhile, why in (
        (counting, nothing, "it also writes, logs or updates a metric"),
        (in_its_mode, nn.Module.eval, "modes of modules or values that it reads are others"),
        (with_its_rate, slower, "modes of modules or values that it reads are others"),
    ):
        assert why in refusal(forward, meanwhile), forward
    assert not refusal(in_its_mode, nothing) and not refusal(with_its_rate, nothing)


def check_buffers_that_are_read_and_changed() -> None:
    compare(moments, lambda call, x: call("net", x).square().mean() + call("net", x + 1).sum())


def check_tied() -> None:
    """A parameter that belongs to two modules is gathered for both, and has the gradient of both."""

    def loss_of(call: Forward, x: Tensor) -> Tensor:
        return call("other", torch.sin(call("net", x))).square().mean()

    root = around(tied)
    root["other"].weight = root["net"].linear.weight
    reference, engine = copy.deepcopy(root), engine_of(root, MESHES[2])
    loss_of(plain(reference), mine()).backward()
    loss_of(caller(engine), mine()).backward()
    expected = reference["other"].weight.grad
    dist.all_reduce(expected)
    torch.testing.assert_close(full(engine.module["other"].weight.grad), expected / 2, rtol=1e-5, atol=1e-6)


def check_layouts() -> None:
    """Ranks that differ are told so, all of them, and go on together."""
    engine = engine_of(around(lambda module, x, *rest: module.linear(x)), MESHES[2])
    call, rank = caller(engine), dist.get_rank()
    assert call("net", mine()).shape == (3, 4)
    for arguments in [(mine(3 + rank),), (mine(), rank), (mine(), [None] if rank else (None,))]:
        assert raised(partial(call, "net", *arguments)).startswith(
            "RanksDifferError: ranks call step:net with different"
        )
    elsewhere = raised(lambda: call("net" if rank else "other", mine()))
    assert elsewhere.startswith("OtherRankError: ranks have come to different places of a step")
    assert "neither tensor nor plain value" in raised(lambda: call("net", mine(), object()))
    assert raised(lambda: call("net", mine(), object() if rank else None)).startswith("RanksDifferError")
    assert call("net", mine()).shape == (3, 4)


def check_states() -> None:
    """No gradients, frozen parameters, autocast: each has a graph of its own."""
    engine = engine_of(around(lambda module, x: module.linear(x)), MESHES[2])
    call = caller(engine)
    with torch.no_grad():
        assert not call("net", mine()).requires_grad
    assert call("net", mine()).requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = call("net", mine())
    assert half.dtype == torch.bfloat16 and call("net", mine()).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half.float().sum().backward()
    assert engine.module["net"].linear.weight.grad.dtype == torch.float32
    engine.module["net"].requires_grad_(False)
    assert not call("net", mine()).requires_grad
    given = mine().requires_grad_()
    call("net", given).sum().backward()
    weight = full(engine.module["net"].linear.weight)
    torch.testing.assert_close(given.grad, weight.sum(0).expand(3, 4))
    assert set(engine.reports) == {"step:net", "step:net:inference"}


def check_draws() -> list[float]:
    """Random draws of two calls, which differ from each other and between ranks."""
    engine = engine_of(around(lambda module, x: F.dropout(module.linear(x) * 0 + 1)), MESHES[2])
    call = caller(engine)
    one, two = call("net", torch.ones(64, 4)), call("net", torch.ones(64, 4))
    assert not torch.equal(one, two)
    return one.flatten().tolist()


def check_one_rank_fails() -> None:
    """What stops the compiler of one rank stops all of them."""
    engine = engine_of(around(lambda module, x: module.linear(x)), MESHES[2], compile=True)
    if dist.get_rank() == 1:
        patched = pytest.MonkeyPatch()
        patched.setattr("lightning_autoparallel.compile.backend.compile_graph", None)
    text = raised(lambda: caller(engine)("net", mine()))
    if dist.get_rank() == 1:
        patched.undo()
    assert text.startswith("CaptureError: ") and "NoneType" in text, text


CHECKS = [
    check_second_order,
    check_second_order_beside_a_buffer,
    check_what_is_others_by_then,
    check_buffers_that_are_read_and_changed,
    check_tied,
    check_layouts,
    check_states,
    check_one_rank_fails,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_two_ranks(check: Callable[[], None], worlds: Worlds) -> None:
    worlds(2).run(check)


def test_draws_differ_between_ranks_and_calls(worlds: Worlds) -> None:
    one, other = worlds(2).run(check_draws)
    assert one != other


def alone() -> str:
    def refused(forward: Forward, *given: Tensor) -> str:
        return raised(lambda: caller(engine_of(around(forward), MESHES[2]))("net", *given))

    leaf = mine().requires_grad_()
    outside = nn.Parameter(torch.ones(4))
    return "\n".join(
        [
            refused(lambda module, x: module.linear(x.add_(1)), mine()),
            refused(lambda module, x: module.linear(F.relu(x, inplace=True)), leaf * 1),
            refused(lambda module, x: (module.linear(x), object()), mine()),
            refused(lambda module, x: module.linear(x) * outside, mine()),
            refused(lambda module, x: x, mine()),
            refused(lambda module, x: module.linear(x) if x.sum() > 0 else x, mine()),
        ]
    )


def test_what_cannot_be_captured(worlds: Worlds) -> None:
    for text in worlds(2).run(alone):
        lines = text.split("\n")
        assert all(line.startswith("CaptureError: ") for line in lines), text
        expected = ["in place", "in place", "returns a builtins.object", "requires a gradient", "nothing to"]
        assert all(part in line for part, line in zip(expected, lines, strict=False)), text


def test_errors_are_told_apart() -> None:
    assert not issubclass(RanksDifferError, CaptureError)
