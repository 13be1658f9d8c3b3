"""Tensors that a step makes out of nothing but Python numbers: their values are known while everything else is fake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

_ATTRIBUTE = "_known_constant"
_LARGEST = 2**22  # elements; nothing larger is worth computing twice
_READS = {Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__}


def is_constant(tensor: Tensor) -> bool:
    """Whether a step made ``tensor`` out of nothing but Python numbers."""
    return hasattr(tensor, _ATTRIBUTE)


def copy_constant(source: Tensor, target: Tensor) -> None:
    """Make ``target`` as known, or unknown, as ``source``."""
    if is_constant(source):
        setattr(target, _ATTRIBUTE, getattr(source, _ATTRIBUTE))
    elif is_constant(target):
        delattr(target, _ATTRIBUTE)


class KnownConstants:
    """Computes constants of the step for real, beside the trace, so that Python may decide by them.

    Torch's own modules do: ``nn.Transformer`` compares the mask it was given with a causal one.
    """

    def __init__(self) -> None:
        self._changed: set[int] = set()

    def read(self, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
        """Whether ``function(*args)`` reads a known constant, and what it reads."""
        if function not in _READS or not (known := self._value(args[0])) is not None:
            return False, None
        with _disable_current_modes():
            return True, function(known)

    def observe(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note what ``result`` is, if everything that went into it is known."""
        mutates = _mutates(function, kwargs)
        if args and not mutates and isinstance(args[0], Tensor) and self._value(args[0]) is None:
            return  # most calls end here
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        known = [self._value(tensor) for tensor in tensors]
        if any(value is None for value in known):
            if mutates:
                self._changed.update(value.untyped_storage().data_ptr() for value in known if value is not None)
            return
        results = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        if (not results and not mutates) or any(leaf.numel() > _LARGEST for leaf in results):
            return
        values = self._compute(function, args, kwargs)
        if values is None or len(values) != len(results):
            return
        for leaf, value in zip(results, values, strict=True):
            setattr(leaf, _ATTRIBUTE, value)

    def _value(self, tensor: Any) -> Tensor | None:
        value = getattr(tensor, _ATTRIBUTE, None)
        return None if value is None or value.untyped_storage().data_ptr() in self._changed else value

    def _compute(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Tensor] | None:
        def real(leaf: Any) -> Any:
            return self._value(leaf) if isinstance(leaf, Tensor) else leaf

        with _disable_current_modes(), torch.no_grad():
            state = torch.get_rng_state()
            result = function(*tree_map(real, args), **tree_map(real, kwargs))
            if not torch.equal(state, torch.get_rng_state()):
                torch.set_rng_state(state)
                return None
        return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]


def _mutates(function: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or "out" in kwargs or (name.startswith("__i") and name.endswith("__")) or name == "__setitem__"
