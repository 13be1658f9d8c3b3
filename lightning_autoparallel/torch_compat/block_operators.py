"""Operators that stand for a call of a repeated block in a traced graph, and for its backward.

Geometries travel as text (``describe_tensors``), so that fake results need no table of blocks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("lightning_autoparallel::block", mutates_args=())
def _block(tensors: list[Tensor], results: str, template: int, number: int) -> list[Tensor]:
    raise NotImplementedError("stands for a block while a step is traced; nothing runs it")


@torch.library.custom_op("lightning_autoparallel::block_backward", mutates_args=())
def _block_backward(gradients: list[Tensor], results: str, template: int, number: int) -> list[Tensor]:
    raise NotImplementedError("stands for a block's backward while a step is traced; nothing runs it")


@_block.register_fake
def _(tensors: list[Tensor], results: str, template: int, number: int) -> list[Tensor]:
    return _empty(results, tensors[0].device)


@_block_backward.register_fake
def _(gradients: list[Tensor], results: str, template: int, number: int) -> list[Tensor]:
    return _empty(results, gradients[0].device)


BLOCK = torch.ops.lightning_autoparallel.block.default
"""``BLOCK(tensors, results, template, number)``: the results of call ``number`` of a template, as text tells them."""
BLOCK_BACKWARD = torch.ops.lightning_autoparallel.block_backward.default
"""``BLOCK_BACKWARD(gradients of the results, results, template, number)``: the gradients of that call's tensors."""


class UnrepeatableBackwardError(Exception):
    """A block's backward runs in another way than the template's was traced; the step is then traced whole."""


@dataclass(frozen=True, kw_only=True)
class BlockCall:
    """What stands for one call: geometries as text, and which of the tensors (by position) get gradients."""

    template: int
    number: int
    results: str
    gradients: str
    differentiated: tuple[int, ...]
    inputs: int


def call_block(call: BlockCall, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The fake results of a call on ``tensors``, with a backward that is one call too.

    Raises:
        UnrepeatableBackwardError: in the backward, if not every result has a gradient.
    """
    return tuple(_Call.apply(call, *tensors))


def describe_tensors(tensors: Sequence[Tensor]) -> str:
    """The geometry of tensors as text: shape, stride and dtype of each."""
    return json.dumps([[list(t.shape), list(t.stride()), str(t.dtype).removeprefix("torch.")] for t in tensors])


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: BlockCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(BLOCK(list(tensors), call.results, call.template, call.number))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        call: BlockCall = ctx.call
        given = [gradient for gradient in gradients if gradient is not None]
        if len(given) != len(gradients):
            raise UnrepeatableBackwardError
        dense = [_laid_out(gradient, row) for gradient, row in zip(given, json.loads(call.results), strict=True)]
        by_input: list[Tensor | None] = [None] * call.inputs
        made = BLOCK_BACKWARD(dense, call.gradients, call.template, call.number)
        for position, gradient in zip(call.differentiated, made, strict=True):
            by_input[position] = gradient
        return None, *by_input


def _laid_out(gradient: Tensor, row: Any) -> Tensor:
    """The gradient as the template's backward was traced with: laid out like the result."""
    shape, stride, _ = row
    if list(gradient.stride()) == stride:
        return gradient
    if not torch.empty_strided(shape, stride, device="meta").is_contiguous():
        raise UnrepeatableBackwardError
    return gradient.contiguous()


def _empty(results: str, device: torch.device) -> list[Tensor]:
    return [
        torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
        for shape, stride, dtype in json.loads(results)
    ]
