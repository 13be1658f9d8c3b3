"""Batches of any nesting as flat leaves, and back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.torch_compat.tree import registered_children

Rebuild = Callable[[list[Any]], Any]
Leaves = list[tuple[str, Any]]

_MOST_NESTED = 4  # objects in objects; what lies deeper is something else than a batch
_NUMBERS = (bool, int, float, complex, numpy.generic)
_TEXTS = (str, bytes, type(None))
_WHOLE = (*_NUMBERS, *_TEXTS, Enum, type, torch.dtype, torch.device, torch.Generator)
_NO_DATA = (nn.Module, ModuleType, FunctionType, BuiltinFunctionType)
_STANDARD = ("builtins", "pathlib", "datetime", "decimal", "fractions", "uuid")


def flatten_batch(batch: Any) -> tuple[Leaves, Rebuild]:
    """The leaves of ``batch`` with their paths (``"inputs.0"``), and a function that puts new leaves back.

    Mappings, sequences, named tuples, dataclasses, what is registered with torch's pytree and objects with tensors in
    their attributes are containers; everything else is a leaf.
    """
    return _flatten(batch, ())


def _flatten(value: Any, inside: tuple[int, ...]) -> tuple[Leaves, Rebuild]:
    children = _children(value)
    if children is None:
        return _flatten_object(value, inside)
    keys, items, build = children
    return _joined(keys, [_flatten(item, inside) for item in items], build)


def _joined(keys: list[Any], parts: list[tuple[Leaves, Rebuild]], build: Rebuild) -> tuple[Leaves, Rebuild]:
    leaves = [
        (f"{key}.{path}" if path else str(key), leaf)
        for key, part in zip(keys, parts, strict=True)
        for path, leaf in part[0]
    ]

    def rebuild(values: list[Any]) -> Any:
        rebuilt, start = [], 0
        for part_leaves, part_rebuild in parts:
            rebuilt.append(part_rebuild(values[start : start + len(part_leaves)]))
            start += len(part_leaves)
        return build(rebuilt)

    return leaves, rebuild


def check_same_leaves(name: str, batch: Any, leaves: Sequence[Any]) -> None:
    """After a step has run on ``batch``, which was built of ``leaves``.

    Raises:
        CaptureError: the step put something else in, or took something out.
    """
    now = [leaf for _, leaf in flatten_batch(batch)[0]]
    if len(now) != len(leaves) or any(one is not other for one, other in zip(now, leaves, strict=True)):
        raise CaptureError(
            f"{name} puts something into what it is given, or takes something out: real batches and arguments would "
            "stay as they are; return it, or keep it as an attribute"
        )


def _children(value: Any) -> tuple[list[Any], list[Any], Rebuild] | None:
    if _is_whole(value):
        return None
    if isinstance(value, Mapping) and not isinstance(value, dict) and (registered := registered_children(value)):
        return _keys_of(value, registered[0]), *registered
    if isinstance(value, Mapping):
        keys = list(value)
        return (
            keys,
            [value[key] for key in keys],
            lambda items: _mapping_like(value, dict(zip(keys, items, strict=True))),
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(value._fields), list(value), lambda items: type(value)(*items)
    if isinstance(value, (list, tuple)):
        return list(range(len(value))), list(value), type(value)
    if (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and all(field.init for field in dataclasses.fields(value))
    ):
        names = [field.name for field in dataclasses.fields(value)]
        return (
            names,
            [getattr(value, name) for name in names],
            lambda items: dataclasses.replace(value, **dict(zip(names, items, strict=True))),
        )
    registered = registered_children(value)
    return registered and (list(range(len(registered[0]))), *registered)


def _keys_of(value: Mapping[Any, Any], children: Sequence[Any]) -> list[Any]:
    """The key of each child of a registered kind, or its position where they are not what keys lead to.

    What it iterates over need not be keys: a TensorDict has rows.
    """
    keys = {id(value[key]): key for key in value.keys()}  # noqa: SIM118
    is_by_key = len(keys) == len(children) and all(id(child) in keys for child in children)
    return [keys[id(child)] for child in children] if is_by_key else list(range(len(children)))


def _is_whole(value: Any) -> bool:
    if isinstance(value, Tensor):  # by itself: torch 2.14 traces no tensor through kinds with a check of their own
        return True
    return isinstance(value, _WHOLE)


def structure_of(batch: Any) -> str:
    """The containers of ``batch`` as text, a star for each leaf."""
    children = _children(batch)
    if children is None:
        return "*"
    keys, items, _ = children
    inside = ", ".join(f"{key!r}: {structure_of(item)}" for key, item in zip(keys, items, strict=True))
    return f"{type(batch).__qualname__}({inside})"


def _mapping_like(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return items
    if not hasattr(original, "__setitem__"):
        return type(original)(items)  # type: ignore[call-arg]
    made: Any = copy.copy(original)  # keeps what it holds besides items: a default, attributes
    for key, item in items.items():
        made[key] = item
    return made


def _flatten_object(value: Any, inside: tuple[int, ...]) -> tuple[Leaves, Rebuild]:
    """An object as its attributes, if there are tensors among them."""
    alone: tuple[Leaves, Rebuild] = [("", value)], lambda leaves: leaves[0]
    if is_data(value) or isinstance(value, _NO_DATA) or id(value) in inside or len(inside) == _MOST_NESTED:
        return alone
    attributes = _attributes(value)
    parts = [_flatten(item, (*inside, id(value))) for item in attributes.values()]
    if not any(isinstance(leaf, Tensor) for part in parts for _, leaf in part[0]):
        return alone

    def build(items: list[Any]) -> Any:
        kind: Any = type(value)
        made = copy.copy(value) if hasattr(value, "__copy__") else kind.__new__(kind)
        for name, item in zip(attributes, items, strict=True):
            object.__setattr__(made, name, item)  # also where the class is frozen
        return made

    return _joined(list(attributes), parts, build)


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
    own = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return own | dict(getattr(value, "__dict__", {}))


def _slots_of(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if not name.startswith("__")]


def is_data(value: Any) -> bool:
    """Whether a leaf is plain: a tensor, a number, a text, or one of the standard library's values."""
    return _is_whole(value) or type(value).__module__.partition(".")[0] in _STANDARD


def ragged_part(value: Any, depth: int = 0) -> str | None:
    """The kind of a container whose tensors have no common dim for the batch, if ``value`` has one inside."""
    if isinstance(value, PackedSequence):
        return "PackedSequence"
    if any(kind.__module__.startswith("torch_geometric.") for kind in type(value).__mro__):
        return type(value).__name__
    if isinstance(value, Tensor):
        return None if value.layout is torch.strided and not value.is_nested else f"{value.layout} tensor"
    children = _children(value)
    if children is not None:
        items = children[1]
    else:
        whole = is_data(value) or isinstance(value, _NO_DATA) or depth == _MOST_NESTED
        items = [] if whole else list(_attributes(value).values())
    return next((found for item in items if (found := ragged_part(item, depth + (children is None)))), None)
