"""Which calls of hooks are left to whoever can compute with shards and whole tensors."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_autoparallel.lightning_compat import trainer_calls
from lightning_autoparallel.lightning_compat.hooks import around_hooks
from lightning_autoparallel.strategy.mixed_operands import MixedOperands


@pytest.fixture
def sharded(fake_mesh) -> DTensor:
    """(3, 4) in rows that two ranks cannot share evenly."""
    return distribute_tensor(torch.ones(3, 4), fake_mesh(dp_shard=2).submesh(("dp_shard",)), [Shard(0)])


def left(call: Any) -> list[str]:
    """The names of the functions that are left to others while ``call`` is made."""
    names: list[str] = []

    def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        names.append(func.__name__)
        return torch.zeros(3, 4)

    with MixedOperands(compute):
        call()
    return names


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda x: torch.zeros(3, 4).lerp_(x, 0.5), ["lerp_"]),
        (lambda x: x.add_(torch.ones(3, 4)), ["add_"]),
        (lambda x: x - torch.ones(4), ["sub"]),
        (lambda x: torch.where(torch.ones(3, 4) > 0, x, x), ["where"]),
        (lambda x: torch._foreach_lerp_([torch.zeros(3, 4)], [x], 0.5), ["_foreach_lerp_"]),
        (lambda x: torch.add(x, other=torch.ones(3, 4)), ["add"]),
        (lambda x: x.flatten(), ["flatten"]),
        (lambda x: x.mul_(2.0).add_(x), []),
        (lambda x: x * torch.tensor(2.0), []),
        (lambda x: x * torch.tensor([2.0]), []),
        (lambda x: torch.ones(3, 4).add_(torch.ones(4)), []),
    ],
)
def test_calls_of_both_and_calls_that_shards_cannot_be_given_are_left(call, names: list[str], sharded: DTensor):
    assert left(lambda: call(sharded)) == names


def test_other_errors_are_those_of_the_call(sharded: DTensor):
    with pytest.raises(TypeError):
        left(lambda: sharded.add_("text"))
    with pytest.raises(RuntimeError, match="size"):
        left(lambda: torch.ones(3).add_(torch.ones(2)))


def test_hooks_run_inside_and_nothing_else_does():
    said: list[str] = []

    @contextlib.contextmanager
    def context():
        said.append("in")
        yield
        said.append("out")

    class Module:
        _current_fx_name = None
        on_train_end = optimizer_step = staticmethod(lambda: said.append("called"))

    profiler = SimpleNamespace(profile=lambda name: contextlib.nullcontext())
    trainer = SimpleNamespace(lightning_module=Module(), profiler=profiler, callbacks=[])
    before = trainer_calls._call_lightning_module_hook
    with around_hooks(context):
        trainer_calls._call_lightning_module_hook(trainer, "on_train_end")
        trainer_calls._call_lightning_module_hook(trainer, "optimizer_step")
        trainer_calls._call_callback_hooks(trainer, "on_train_end")
    assert said == ["in", "called", "out", "called", "in", "out"]
    assert trainer_calls._call_lightning_module_hook is before
