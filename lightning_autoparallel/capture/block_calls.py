"""What a call of a block is given and gives back, compared and put together again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autoparallel.capture.repeats import same_value
from lightning_autoparallel.torch_compat.constants import is_constant
from lightning_autoparallel.torch_compat.tracing import mark_parameter
from lightning_autoparallel.torch_compat.tree import tree_flatten, tree_unflatten


@dataclass(frozen=True, kw_only=True)
class BlockInputs:
    """One call's inputs: ``tensors`` holds each tensor once, ``leaves`` point into it or are plain values.

    ``state`` maps names of parameters and buffers, relative to the block, to positions in ``tensors``.
    """

    tensors: tuple[Tensor, ...]
    leaves: tuple[Any, ...]  # ("tensor", position) | ("plain", value)
    spec: Any
    state: Mapping[str, int]
    ambient: tuple[Any, ...]  # gradient mode and autocast

    @classmethod
    def of(cls, block: nn.Module, args: Any, kwargs: Any) -> BlockInputs:
        """What ``block(*args, **kwargs)`` reads, as modes and parameters are now."""
        tensors: list[Tensor] = []
        positions: dict[int, int] = {}

        def position_of(tensor: Tensor) -> int:
            if id(tensor) not in positions:
                positions[id(tensor)] = len(tensors)
                tensors.append(tensor)
            return positions[id(tensor)]

        flat, spec = tree_flatten((args, kwargs))
        leaves = [("tensor", position_of(leaf)) if isinstance(leaf, Tensor) else ("plain", leaf) for leaf in flat]
        state = {name: position_of(tensor) for name, tensor in _state_of(block)}
        return cls(tensors=tuple(tensors), leaves=tuple(leaves), spec=spec, state=state, ambient=_ambient(tensors))

    def equal(self, other: BlockInputs) -> bool:
        """Whether the same code does the same with both; known constants must be the same tensors."""
        return (
            self.spec == other.spec
            and self.state == other.state
            and self.ambient == other.ambient
            and len(self.leaves) == len(other.leaves)
            and all(kind == k and same_value(x, y) for (kind, x), (k, y) in zip(self.leaves, other.leaves, strict=True))
            and len(self.tensors) == len(other.tensors)
            and all(map(_alike, self.tensors, other.tensors))
        )

    def same_constants(self, other: BlockInputs) -> bool:
        """Whether both calls have as many tensors, and those whose values are known are the very same."""
        if len(self.tensors) != len(other.tensors):
            return False
        pairs = zip(self.tensors, other.tensors, strict=True)
        return all(one is two for one, two in pairs if is_constant(one) or is_constant(two))

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """``(args, kwargs)`` of a call on other tensors."""
        flat = [tensors[value] if kind == "tensor" else value for kind, value in self.leaves]
        return tree_unflatten(flat, self.spec)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class BlockResults:
    """One call's results: ``tensors`` are those that it made, ``leaves`` point to them, to inputs, or are plain."""

    tensors: tuple[Tensor, ...]
    leaves: tuple[Any, ...]  # ("made", position) | ("input", position) | ("plain", value)
    spec: Any

    @classmethod
    def of(cls, output: Any, inputs: BlockInputs) -> BlockResults | None:
        """The parts of ``output``; None if a result shares memory with an input or another result."""
        flat, spec = tree_flatten(output)
        given = {id(tensor): position for position, tensor in enumerate(inputs.tensors)}
        made: list[Tensor] = []
        leaves: list[Any] = []
        for leaf in flat:
            if not isinstance(leaf, Tensor):
                leaves.append(("plain", leaf))
            elif id(leaf) in given:
                leaves.append(("input", given[id(leaf)]))
            else:
                leaves.append(("made", len(made)))
                made.append(leaf)
        storages = [tensor.untyped_storage()._cdata for tensor in (*inputs.tensors, *made)]
        if len(set(storages[len(inputs.tensors) :]) - set(storages[: len(inputs.tensors)])) < len(made) or not made:
            return None
        return cls(tensors=tuple(made), leaves=tuple(leaves), spec=spec)

    def output(self, inputs: Sequence[Tensor], made: Sequence[Tensor]) -> Any:
        """The result of a call on other tensors."""
        table = {"input": inputs, "made": made}
        flat = [value if kind == "plain" else table[kind][value] for kind, value in self.leaves]
        return tree_unflatten(flat, self.spec)


def call_on(block: nn.Module, inputs: BlockInputs, tensors: Sequence[Tensor]) -> Any:
    """``block.forward`` on other tensors, in the modes of ``inputs``, without the block's own hooks."""
    args, kwargs = inputs.arguments(tensors)
    state = {f"block.{name}": tensors[position] for name, position in inputs.state.items()}
    for name, _ in block.named_parameters():
        if f"block.{name}" in state:  # tied ones are there once
            mark_parameter(state[f"block.{name}"])
    with autocast_as(inputs):
        return torch.func.functional_call(_Bare(block), state, (args, kwargs))


@contextlib.contextmanager
def autocast_as(inputs: BlockInputs) -> Iterator[None]:
    """The autocast that a call was made under."""
    _, device_type, enabled, dtype = inputs.ambient
    with torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=torch.is_autocast_cache_enabled()):
        yield


class _Bare(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, args: Any, kwargs: Any) -> Any:
        return self.block.forward(*args, **kwargs)


def _state_of(block: nn.Module) -> list[tuple[str, Tensor]]:
    return [*block.named_parameters(), *block.named_buffers()]


def _ambient(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    device_type = tensors[0].device.type if tensors else "cpu"
    enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    return torch.is_grad_enabled(), device_type, enabled, dtype


def _alike(one: Tensor, other: Tensor) -> bool:
    return (
        one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.device == other.device
        and one.requires_grad == other.requires_grad
        and is_constant(one) == is_constant(other)
    )
