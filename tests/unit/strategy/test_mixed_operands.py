"""Which calls of hooks are left to whoever can compute with shards and whole tensors."""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.lightning_compat import trainer_calls
from lightning_autoparallel.lightning_compat.hooks import around_hooks
from lightning_autoparallel.strategy.mixed_operands import MixedOperands


@pytest.fixture
def sharded(fake_mesh) -> DTensor:
    """(3, 4) in rows that two ranks cannot share evenly."""
    return distribute_tensor(torch.ones(3, 4), fake_mesh(dp_shard=2).submesh(("dp_shard",)), [Shard(0)])


class Computing:
    """In the place of whole parameters: the names of the functions that it is given."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.said: list[str] = []
        self.written: list[tuple[torch.Size, list[Any]]] = []
        self.written_back = 0

    def __torch_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> torch.Tensor:
        self.names.append(func.__name__)
        return torch.zeros(3, 4)

    def wrote(self, target: torch.Tensor, values: Any) -> None:
        self.written.append((target.shape, list(values)))

    def write_back(self) -> None:
        self.written_back += 1

    def forget(self) -> None:
        self.said.append("forgotten")

    def paused(self) -> contextlib.AbstractContextManager[None]:
        self.said.append("paused")
        return contextlib.nullcontext()


def left(call: Any, is_inside: bool = False) -> list[str]:
    """The names of the functions that are given whole parameters while ``call`` is made, without gradients."""
    computing, met = Computing(), []
    with torch.no_grad(), MixedOperands(computing, met.append, lambda: is_inside):  # type: ignore[arg-type]
        call()
    assert computing.said == ["forgotten"] * bool(computing.names)
    assert set(met) <= set(computing.names) and bool(met) == bool(computing.names)
    return computing.names


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
        (lambda x: (x.flatten(), x.mul(2.0), x.detach()), ["flatten", "mul"]),
        (lambda x: x[2], ["__getitem__"]),
        (lambda x: x.data.__setitem__(0, 1.0), ["__setitem__"]),
        (lambda x: x[0:2], ["__getitem__"]),
        (lambda x: x.chunk(3), ["chunk"]),
        (lambda x: x.split(1), ["split"]),
        (lambda x: x.unbind(), ["unbind"]),
        (lambda x: x.narrow(-2, 1, 1), ["narrow"]),
        (lambda x: x.diagonal(), ["diagonal"]),
        (lambda x: torch.randn_like(x), ["randn_like"]),
        (lambda x: x.normal_(), ["normal_"]),
        (lambda x: nn.init.kaiming_uniform_(x), ["kaiming_uniform_"]),
        (lambda x: nn.init.constant_(x, 1.0), []),
        (lambda x: (x.t(), x[:, 1], x.select(1, 2), x.T[1].zero_(), x.view(3, 2, 2)), []),
        (lambda x: x[[1, 0]], ["__getitem__"]),
        (lambda x: (torch.ones(3) + 1, x[0], torch.ones(3).zero_()), ["__getitem__"]),
        (lambda x: (torch.equal(x, other=torch.ones(4)), torch.ones(3, 4, 1).equal(x)), []),
        (lambda x: x.mul_(2.0).add_(x), []),
        (lambda x: torch.ones(12, 1).view_as(x).reshape_as(x).expand_as(x).type_as(x), []),
        (lambda x: x * torch.tensor(2.0), []),
        (lambda x: x * torch.tensor([2.0]), []),
        (lambda x: torch.ones(3, 4).add_(torch.ones(4)), []),
        (lambda x: copy.deepcopy([torch.ones(3), x, {"y": torch.ones(3)}]), []),
    ],
)
def test_calls_of_both_and_calls_that_shards_cannot_be_given_are_left(call, names: list[str], sharded: DTensor):
    assert left(lambda: call(sharded)) == names


@pytest.mark.parametrize(
    ("call", "values"),
    [
        (lambda x: x.mul_(2.0), [2.0]),
        (lambda x: nn.init.constant_(x, 3.0), [3.0]),
        (lambda x: torch._foreach_mul_([x], 4.0), [4.0]),
        (lambda x: x.mul(2.0), None),
        (lambda x: torch.ones(3, 4).add_(torch.ones(4)), None),
    ],
)
def test_what_is_written_into_shards_as_they_are_is_noted(call, values: list[float] | None, sharded: DTensor):
    computing = Computing()
    with torch.no_grad(), MixedOperands(computing, lambda name: None, lambda: False):  # type: ignore[arg-type]
        call(sharded)
    assert computing.written == ([] if values is None else [(sharded.shape, values)])


def test_nothing_is_done_in_steps_and_where_torch_is_told_to_replicate(sharded: DTensor):
    with pytest.raises(RuntimeError, match="mixed"):
        left(lambda: sharded + torch.ones(3, 4), is_inside=True)
    with implicit_replication():
        assert left(lambda: sharded + torch.ones(3, 4)) == []


def test_a_gradient_that_nobody_reduces_is_refused(sharded: DTensor):
    sharded.requires_grad_()
    computing = Computing()
    with MixedOperands(computing, lambda name: None, lambda: False):  # type: ignore[arg-type]
        (sharded * 2).sum().backward()
        with pytest.raises(CaptureError, match=r"test_mixed_operands.py:\d+ gives sub a parameter.*detach"):
            sharded - torch.ones(3, 4)
        with pytest.raises(CaptureError, match=r"test_mixed_operands.py:\d+ gives flatten a parameter.*detach"):
            sharded.flatten()
        assert computing.said == [] and not isinstance(sharded.detach() - torch.ones(3, 4), DTensor)
        assert isinstance(sharded * 2, DTensor) and computing.said == ["paused"]
    assert sharded.grad is not None and computing.names == ["sub"]


def test_a_part_of_what_autograd_follows_is_read_and_not_written(sharded: DTensor):
    sharded.requires_grad_()
    with MixedOperands(Computing(), lambda name: None, lambda: False):  # type: ignore[arg-type]
        row, rows = sharded[1], sharded.split([1, 2])
        assert row.requires_grad and isinstance(row.sum() + rows[1].sum(), DTensor)
        for part in (row.data, row.detach()[1:], rows[1].data):
            with pytest.raises(CaptureError, match=r"test_mixed_operands.py:\d+ writes into a part.*parameter.data"):
                part.zero_()
        row.clone().detach().zero_()
        with pytest.raises(CaptureError, match=r"test_mixed_operands.py:\d+ draws random numbers.*detach"):
            torch.dropout(sharded, 0.5, True)


def test_numbers_are_drawn_for_whole_parameters_where_autograd_follows_them(sharded: DTensor):
    sharded.requires_grad_()
    computing = Computing()
    with MixedOperands(computing, lambda name: None, lambda: False):  # type: ignore[arg-type]
        torch.randn_like(sharded)
        nn.init.kaiming_uniform_(sharded)
    assert computing.names == ["randn_like", "kaiming_uniform_"]


def test_shards_are_up_to_date_behind_each_call_once_whole_parameters_were_given(sharded: DTensor):
    computing, counted = Computing(), []
    with torch.no_grad(), MixedOperands(computing, lambda name: None, lambda: False):  # type: ignore[arg-type]
        for call in (torch.ones(3).zero_, sharded.flatten, torch.ones(3).zero_):
            call()
            counted.append(computing.written_back)
        assert isinstance(sharded.to(torch.float64), DTensor) and computing.said == ["paused"]
    assert counted == [0, 1, 2]


def test_code_that_knows_shards_leaves_it_from_inside_of_other_modes(sharded: DTensor):
    computing = Computing()
    mode = MixedOperands(computing, lambda name: None, lambda: False)  # type: ignore[arg-type]
    with torch.no_grad(), mode, torch.device("cpu"):
        with mode.left():
            assert isinstance(sharded[1], DTensor) and computing.names == []
        assert not isinstance(sharded[1], DTensor) and computing.names == ["__getitem__"]


def test_other_errors_are_those_of_the_call(sharded: DTensor):
    with pytest.raises(TypeError):
        left(lambda: sharded.add_("text"))
    with pytest.raises(RuntimeError, match="size"):
        left(lambda: torch.ones(3).add_(torch.ones(2)))


def test_hooks_run_inside_and_nothing_else_does():
    said: list[str] = []

    @contextlib.contextmanager
    def context(name):
        said.append(name)
        yield
        said.append("out")

    class Module:
        _current_fx_name = None
        on_train_end = optimizer_step = configure_gradient_clipping = staticmethod(lambda: said.append("called"))

    profiler = SimpleNamespace(profile=lambda name: contextlib.nullcontext())
    trainer = SimpleNamespace(lightning_module=Module(), profiler=profiler, callbacks=[])
    before = trainer_calls._call_lightning_module_hook
    with around_hooks(context):
        trainer_calls._call_lightning_module_hook(trainer, "on_train_end")
        trainer_calls._call_lightning_module_hook(trainer, "optimizer_step")
        trainer_calls._call_lightning_module_hook(trainer, "configure_gradient_clipping")
        trainer_calls._call_callback_hooks(trainer, "on_train_end")
        trainer_calls._call_callbacks_on_save_checkpoint(trainer, {})
    of_module = ["on_train_end", "called", "out", "optimizer_step", "called", "out", "called"]
    assert said == [*of_module, *["on_train_end", "out"], *["on_save_checkpoint", "out"]]
    assert trainer_calls._call_lightning_module_hook is before
