"""Gradients of what modules compute outside of steps: nobody reduces those of parameters, which are refused.

While such a call runs, its own code may differentiate. What came of it requires a gradient if it does on one device. It
keeps no graph, unless the call was given something that requires a gradient: inputs have theirs.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.pipeline.owed_gradients import OwedGradients
from lightning_autoparallel.torch_compat.interception import is_transformed
from lightning_autoparallel.torch_compat.tree import tree_leaves, tree_map

BACKWARDS = {"backward", "grad"}
_DIFFERENTIATED, _GRADIENTS = ("outputs", "tensors", "self"), ("grad_outputs", "grad_tensors", "gradient")


@dataclass
class _Call:
    """One call of a module, at a line of the user's."""

    line: str
    has_ended: bool = False

    def refuse(self, gradient: Tensor | None) -> None:
        """A backward has come to what was computed.

        Raises:
            CaptureError: the call has ended.
        """
        if self.has_ended:
            raise CaptureError(
                f"{self.line} calls a module outside of a step, and what came of it is differentiated: nobody reduces "
                "gradients of its parameters there; compute it in training_step, or detach what came of it. Gradients "
                "of inputs alone are to be had by torch.autograd.grad(loss, inputs), if they are arguments of the "
                "module that require one"
            )


@dataclass
class OutsideGradients:
    """Ends of the graphs of autograd that calls outside of steps have left, each in the place of some parameters."""

    _ends: list[tuple[frozenset[int], weakref.ref[Tensor]]] = field(default_factory=list)

    def called(self, run: Callable[[], Any], given: Any, owed: OwedGradients, line: str) -> Any:
        """What the call gives; ``owed`` is told what it computes with in the place of parameters."""
        call = _Call(line)
        with owed.refusing(call.refuse) as leaves:
            result = run()
        call.has_ended = True
        if not torch.is_grad_enabled() or not leaves:
            return result
        self._ends = [end for end in self._ends if end[1]() is not None]
        if is_transformed() or any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(given)):
            self._ends += [(frozenset([id(parameter)]), leaf) for parameter, leaf in leaves]
            return result
        anchor = torch.zeros((), requires_grad=True)
        self._ends.append((frozenset(id(parameter) for parameter, _ in leaves), weakref.ref(anchor)))
        return _cut(result, anchor, call)

    def check_asked(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ahead of a backward that names what it asks for: no graph leads to parameters themselves.

        Raises:
            CaptureError: what is differentiated was computed outside of steps with parameters that are asked for.
        """
        named = inspect.signature(func).bind(*args, **kwargs).arguments
        inputs = named.get("inputs")
        given = [inputs] if isinstance(inputs, Tensor) else inputs or []
        asked = {id(tensor) for tensor in given if isinstance(tensor, DTensor)}
        ends = [end for of, reference in self._ends if of & asked and (end := reference()) is not None]
        if ends:
            outputs, gradients = _first(named, _DIFFERENTIATED), _first(named, _GRADIENTS)
            batched = named.get("is_grads_batched", False)
            torch.autograd.grad(outputs, ends, gradients, True, allow_unused=True, is_grads_batched=batched)


class Asking(TorchFunctionMode):
    """Open where hooks compute with shards as they lie: it looks at backwards only."""

    def __init__(self, gradients: OutsideGradients) -> None:
        super().__init__()
        self._gradients = gradients

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in BACKWARDS:
            self._gradients.check_asked(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Cut(torch.autograd.Function):
    """A result without the graph that it came of; its gradient is refused."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.call.refuse(None)
        raise AssertionError("results are cut when their call has ended")


def _cut(result: Any, anchor: Tensor, call: _Call) -> Any:
    known: dict[int, Tensor] = {}

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad or leaf.is_leaf:
            return leaf
        if id(leaf) not in known:
            known[id(leaf)] = _Cut.apply(leaf.detach(), anchor, call)  # type: ignore[no-untyped-call]
        return known[id(leaf)]

    return tree_map(cut, result)


def _first(named: dict[str, Any], names: Sequence[str]) -> Any:
    return next((named[name] for name in names if name in named), None)
