"""Calls of single modules as local programs: which arguments they may have, which results are the graph's."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_autoparallel.capture.batch import BatchLayout, BatchLeaf, one_memory
from lightning_autoparallel.capture.leaves import flatten_batch, structure_of
from lightning_autoparallel.contracts import PassedOn
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.torch_compat.viewable import storage_of

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.memory_format,
    enum.Enum,
)


def describe_call(batch: Any, device: torch.device, training: bool) -> BatchLayout:
    """The layout of ``(args, kwargs)``: every tensor is this rank's own, every other leaf is told apart by its value.

    What a graph cannot be given is not raised here but in ``refused``: ranks compare layouts first.
    """
    leaves, _ = flatten_batch(batch)
    refusals = (_refusal(path, leaf, device) for path, leaf in leaves)
    same, sharing = one_memory([leaf for _, leaf in leaves if isinstance(leaf, Tensor)])
    return BatchLayout(
        leaves=tuple(_leaf(path, leaf, training) for path, leaf in leaves),
        same=same,
        sharing=sharing,
        structure=structure_of(batch),
        refused=next((refusal for refusal in refusals if refusal), ""),
    )


def _leaf(path: str, leaf: Any, training: bool) -> BatchLeaf:
    if not isinstance(leaf, Tensor):
        # As text: 1, 1.0 and True are equal, and are not the same argument.
        value = repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__qualname__
        return BatchLeaf(path=path, shape=None, dtype=None, batched=False, value=value)
    requires_grad = training and leaf.requires_grad
    shape = tuple(leaf.shape)
    return BatchLeaf(path=path, shape=shape, dtype=leaf.dtype, batched=False, requires_grad=requires_grad)


def _refusal(path: str, leaf: Any, device: torch.device) -> str:
    name = f"argument {path.partition('.')[2]}"
    if not isinstance(leaf, Tensor):
        return "" if isinstance(leaf, _PLAIN) else f"{name} is a {_type(leaf)}, which is neither tensor nor plain value"
    if type(leaf) not in (Tensor, nn.Parameter) or leaf.layout is not torch.strided or leaf.is_quantized:
        return f"{name} is a {_type(leaf)} ({leaf.layout}), which is no plain tensor"
    if leaf.device.type != device.type:
        return f"{name} lies on {leaf.device}, the module on {device}"
    return ""


def _type(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


class OwnResults(NamedTuple):
    """Results that the graph computes, and those that it does not, by position."""

    tensors: list[Tensor]
    statics: Mapping[int, Any]


def own_results(
    name: str,
    results: Sequence[Any],
    parameters: Sequence[Tensor],
    buffers: Sequence[Tensor],
    batch: Sequence[Tensor],
) -> OwnResults:
    """``results`` sorted: no two tensors share memory with each other, or with what was given.

    A tensor of the batch that is returned as it is is passed on; views of the batch and of parameters are copied.

    Raises:
        CaptureError: a result is neither tensor nor plain value, or a buffer, or none is computed.
    """
    positions = {id(tensor): i for i, tensor in enumerate(batch)}
    taken = {storage_of(tensor) for tensor in (*parameters, *buffers, *batch)}
    kept = {storage_of(tensor) for tensor in buffers}
    tensors: list[Tensor] = []
    statics: dict[int, Any] = {}
    for i, result in enumerate(results):
        if not isinstance(result, Tensor):
            statics[i] = _plain_result(name, result)
        elif id(result) in positions:
            statics[i] = PassedOn(position=positions[id(result)])
        elif storage_of(result) in kept:
            raise CaptureError(
                f"{name} returns a buffer or a view of one: a graph would return a copy, and what is written into it "
                "would be lost; return what is computed, and read the buffer where it is"
            )
        else:
            tensors.append(result.clone() if storage_of(result) in taken else result)
            taken.add(storage_of(result))
    if not tensors:
        raise CaptureError(f"{name} returns no tensor that it computes: there is nothing to capture")
    return OwnResults(tensors, statics)


def _plain_result(name: str, result: Any) -> Any:
    if isinstance(result, _PLAIN):
        return result
    raise CaptureError(
        f"{name} returns a {_type(result)}, which is neither tensor nor plain value, nor a container that "
        "torch.utils._pytree knows: return a tuple or a dict of tensors, or register the class there"
    )


def check_constants(name: str, constants: Iterable[Tensor]) -> None:
    """Refuse a call that computes with what autograd records elsewhere: its gradient would be lost.

    Raises:
        CaptureError: some constant requires a gradient.
    """
    for constant in constants:
        if constant.requires_grad:
            what = "parameter" if isinstance(constant, nn.Parameter) else "tensor that carries a gradient"
            raise CaptureError(
                f"{name} reads a {what} of shape {list(constant.shape)} that is neither its own nor an argument: hand "
                "it over as an argument"
            )


def capture_failed(name: str, error: Exception) -> CaptureError:
    """What a failure inside of the tracer means for a call; the caller may still run the module as it is."""
    if "InputMutationAOTOutput" in str(error):
        return CaptureError(f"{name} changes an argument or a parameter in place; change a copy of it")
    return CaptureError(f"{name} cannot be captured: {type(error).__name__}: {error}")
