"""Tensors that a step makes out of nothing but Python numbers: their values are known while everything else is fake."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from lightning_autoparallel.torch_compat import cuda_guards
from lightning_autoparallel.torch_compat.generators import generator_states, restore_generators

_ATTRIBUTE = "_known_constant"
_LARGEST = 2**22  # elements; nothing larger is worth computing twice
_READS = {Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__}
_INDEXED = {Tensor.__getitem__, Tensor.__setitem__}


@dataclass(frozen=True)
class _Known:
    """The value of a constant, for as long as its memory is none of ``changed``."""

    value: Tensor
    changed: Mapping[int, Tensor]


def is_constant(tensor: Tensor) -> bool:
    """Whether a step made ``tensor`` out of nothing but Python numbers, and wrote nothing else into it since."""
    return _value(tensor) is not None


@contextlib.contextmanager
def whole_lists_of_constants() -> Iterator[None]:
    """``tolist`` gives what is known inside: the tensors of a trace have one of their own, which no mode is told of."""
    traced = FunctionalTensor.tolist

    def tolist(tensor: FunctionalTensor) -> Any:
        known = _value(tensor)
        if known is None:
            return traced(tensor)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return known.tolist()

    with mock.patch.object(FunctionalTensor, "tolist", tolist):
        yield


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
        # By address: constants that hold something else by now. They are kept, so that no address is used again.
        self._changed: dict[int, Tensor] = {}

    def read(self, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
        """Whether ``function(*args)`` reads a known constant, and what it reads."""
        if function not in _READS or not (known := _value(args[0])) is not None:
            return False, None
        with _disable_current_modes():
            return True, function(known)

    def with_places(self, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with known boolean masks, where one is an index, as the places that they select."""
        if function not in _INDEXED or not isinstance(args[1], (Tensor, tuple)):
            return args
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if not any(_selects(item) and _value(item) is not None for item in index):
            return args
        places = [place for item in index for place in self._places(item)]
        return (args[0], tuple(places), *args[2:])

    def _places(self, item: Any) -> list[Any]:
        value = _value(item) if _selects(item) else None
        if value is None or value.dim() == 0:
            return [item]
        with _disable_current_modes():
            found = [(place.tolist(), place) for place in value.nonzero(as_tuple=True)]
        made = [torch.tensor(numbers, dtype=torch.int64, device=item.device) for numbers, _ in found]
        for tensor, (_, place) in zip(made, found, strict=True):
            setattr(tensor, _ATTRIBUTE, _Known(place, self._changed))
        return made

    def observe(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note what ``result`` is, if everything that went into it is known."""
        written = _written(function, args, kwargs)
        if args and not written and isinstance(args[0], Tensor) and _value(args[0]) is None:
            return  # most calls end here
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        results = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        values = None
        if all(_value(tensor) is not None for tensor in tensors) and (results or written) and _all_plain(args, kwargs):
            values = self._values(function, args, kwargs, results)
        if values is None:
            self._forget(written)
            return
        for leaf, value in zip(results, values, strict=True):
            setattr(leaf, _ATTRIBUTE, _Known(value, self._changed))

    def _forget(self, written: list[Tensor]) -> None:
        """What was written into these, and into all that share their memory, is not known."""
        for value in [known for tensor in written if (known := _value(tensor)) is not None]:
            self._changed[_address(value)] = value

    def _values(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Tensor]
    ) -> list[Tensor] | None:
        if any(leaf.numel() > _LARGEST for leaf in results):
            return None
        values = self._compute(function, args, kwargs)
        return values if values is not None and len(values) == len(results) else None

    def _compute(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Tensor] | None:
        def real(leaf: Any) -> Any:
            return _value(leaf) if isinstance(leaf, Tensor) else leaf

        if cuda_guards.are_loaded():
            function, args, kwargs = cuda_guards.call_on_host(function, args, kwargs)
        with _disable_current_modes(), torch.no_grad():
            states = generator_states()
            try:
                with _DrawsNothing():
                    result = function(*tree_map(real, args), **tree_map(real, kwargs))
            except _Drawn:
                return None
            if restore_generators(states):  # by code that no mode sees
                return None
        return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]


class _Drawn(Exception):
    """What was to be computed is drawn: another step draws another."""


class _DrawsNothing(TorchDispatchMode):
    """Stops before an operator draws."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _Drawn
        return func(*args, **(kwargs or {}))


def _selects(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype is torch.bool


def _all_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether no argument stands for a value of another step: such ones have a torch function of their own."""
    leaves = tree_flatten((args, kwargs))[0]
    return not any(hasattr(type(leaf), "__torch_function__") and not isinstance(leaf, Tensor) for leaf in leaves)


def number_of(tensor: Tensor) -> int | float:
    """The number in a real tensor, also where modes are active that would take it for one of theirs."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        number: int | float = tensor.item()
        return number


def _value(tensor: Any) -> Tensor | None:
    known = getattr(tensor, _ATTRIBUTE, None)
    return None if known is None or _address(known.value) in known.changed else known.value


def _address(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _written(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that the call writes into."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or (name.startswith("__i") and name.endswith("__")) or name == "__setitem__":
        written: Any = args[:1]
    else:
        written = kwargs.get("out")
    return [leaf for leaf in tree_flatten(written)[0] if isinstance(leaf, Tensor)]
