"""Tensors that pass into or out of a call by another way than its arguments and its results.

A block that appends to a list outside of it, or reads what another block left there, cannot be stood in for: the
tensors of the skipped calls would be missing. Both show as soon as torch is called on such a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_autoparallel.torch_compat.tracing import is_fake
from lightning_autoparallel.torch_compat.tree import tree_flatten


@dataclass
class WatchedCall:
    """What one call was given and what it made, by identity; ``has_side_ways`` once another way was seen."""

    _given: dict[int, Tensor]
    _made: dict[int, Tensor] = field(default_factory=dict)  # held, so that no later tensor has the identity of one
    _running: bool = True
    has_side_ways: bool = False

    def returns(self, output: Any) -> None:
        """The call is over: these are its results, whoever reads them."""
        self._running = False
        for leaf in (*_tensors(output), *self._given.values()):
            self._made.pop(id(leaf), None)

    def sees(self, tensors: Sequence[Tensor]) -> None:
        """Somebody reads these tensors."""
        if self._running:
            self.has_side_ways |= any(is_fake(tensor) and not self._knows(tensor) for tensor in tensors)
        else:
            self.has_side_ways |= any(id(tensor) in self._made for tensor in tensors)

    def makes(self, tensors: Sequence[Tensor]) -> None:
        """A call of torch gave these tensors."""
        if self._running:
            self._made.update((id(tensor), tensor) for tensor in tensors)

    def _knows(self, tensor: Tensor) -> bool:
        return id(tensor) in self._given or id(tensor) in self._made


class SideWays(TorchFunctionMode):
    """While open, follows what is read of the tensors of watched calls: inside of the call, and from then on."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[WatchedCall] = []

    def watch(self, given: Sequence[Tensor]) -> WatchedCall:
        """A call begins that is given these tensors; tell it what it ``returns``."""
        call = WatchedCall({id(tensor): tensor for tensor in given})
        self._calls.append(call)
        return call

    def sees(self, value: Any) -> None:
        """Somebody reads ``value`` without torch: the step returns it."""
        for call in self._calls:
            call.sees(_tensors(value))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._calls:
            self.sees((args, kwargs))
        result = func(*args, **kwargs)
        for call in self._calls:
            call.makes(_tensors(result))
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
