"""Values as guards compare them: plain ones by type and value, others by identity, containers by what is in them."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import pathlib
import re
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_autoparallel.capture.places import MISSING, attributes_of
from lightning_autoparallel.capture.watch import is_watched
from lightning_autoparallel.torch_compat.tracing import is_real

_PLAIN: tuple[type, ...] = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    type(NotImplemented),
    range,
    slice,
)
_PLAIN += (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, enum.Enum, pathlib.PurePath)
_PLAIN += (datetime.date, datetime.timedelta, datetime.time, datetime.tzinfo, decimal.Decimal, fractions.Fraction)
_PLAIN += (np.generic, np.dtype, re.Pattern)
# Nothing that a step reads of them changes, or what does is read by Python that is seen.
_FIXED: tuple[type, ...] = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.MethodType,
    types.CodeType,
)
_FIXED += (types.MethodWrapperType, types.WrapperDescriptorType, types.MethodDescriptorType, property, staticmethod)
_FIXED += (
    classmethod,
    types.GenericAlias,
    types.UnionType,
    weakref.ReferenceType,
    np.ufunc,
    types.GetSetDescriptorType,
    type(np.shape),  # what numpy makes of its functions, in C
)
_FIXED += (
    type(lru_cache(len)),
    itemgetter,
    attrgetter,
    methodcaller,
    types.MemberDescriptorType,
    types.ClassMethodDescriptorType,
)
LARGEST = 4096  # entries of the containers that one guard compares
_LARGEST_ARRAY = 65536

Difference = tuple[tuple[Any, ...], Any, Any]
Meet = Callable[[Any, str], None]


class TooLargeError(ValueError):
    """A container or an array is too large to be compared at every step."""


def is_number(value: Any) -> bool:
    """Whether a value can be an input of the graph."""
    return type(value) in (int, float)


def is_plain(value: Any) -> bool:
    """Whether a value cannot change in place, and equality with another says all."""
    if isinstance(value, _PLAIN):
        return True
    return type(value) in (tuple, frozenset) and all(map(is_plain, value))


def is_fixed(value: Any) -> bool:
    """Whether a value is code: it is compared by identity."""
    return isinstance(value, _FIXED)


def same_key(one: Any, other: Any) -> bool:
    """Whether two keys are one: tensors by identity."""
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other))


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same object, or plain, of one type and equal."""
    if one is other:
        return True
    if type(one) is not type(other) or not is_plain(one):
        return False
    return bool(one == other) or (one != one and other != other)


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """What a value was: ``parts`` of a container, by key in their order, else the value itself.

    Without ``content`` only its type counts; of kind ``object``, nothing does. If it ``grows``, entries may come.
    """

    value: Any
    kind: type
    parts: Mapping[Any, Frozen] | None = None
    array: np.ndarray[Any, Any] | None = None
    content: bool = True
    grows: bool = False

    def difference(self, now: Any) -> Difference | None:
        """Where ``now`` differs first: the keys of the part, its value then and now; None if nowhere."""
        if self.kind is object:
            return None
        if not self.content:
            return None if type(now) is self.kind else ((), self.kind.__name__, now)
        if self.array is not None:
            same = _same_array(self.array, now)
            return None if same else ((), "another array", now)
        if self.parts is None:
            return None if equal(self.value, now) else ((), self.value, now)
        parts = contents(now) if type(now) is self.kind else None
        if parts is not None and self.grows:
            parts = {key: parts[key] for key in self.parts if key in parts}
        if parts is None or len(parts) != len(self.parts) or not all(map(same_key, parts, self.parts)):
            return (), f"{self.kind.__name__} of {len(self.parts)}", shown(now)
        for key, part in self.parts.items():
            found = part.difference(parts[key])
            if found is not None:
                return (key, *found[0]), *found[1:]
        return None

    def restore(self) -> None:
        """Give this container, and those in it, the content that they had."""
        for part in (self.parts or {}).values():
            part.restore()
        values = [part.value for part in (self.parts or {}).values()]
        if isinstance(self.value, (list, deque, set)):
            self.value.clear()
            self.value.update(values) if isinstance(self.value, set) else self.value.extend(values)
        elif isinstance(self.value, dict):
            # An OrderedDict keeps a list beside the table, which dict's own methods would leave as it is.
            kind: type[dict[Any, Any]] = OrderedDict if isinstance(self.value, OrderedDict) else dict
            kind.clear(self.value)
            for key, value in zip(self.parts or {}, values, strict=True):
                kind.__setitem__(self.value, key, value)
        elif self.array is not None:
            self.value[...] = self.array


def _same_array(one: np.ndarray[Any, Any], other: Any) -> bool:
    return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)


@dataclass
class Freezer:
    """Freezes values; ``meet(object, text)`` is told of every object that is no plain value and no container."""

    meet: Meet
    budget: int = LARGEST
    _inside: list[int] = field(default_factory=list)

    def freeze(self, value: Any, text: str) -> Frozen:
        """The value as it is now.

        Raises:
            TooLargeError: it has too many entries to be compared at every step.
        """
        if isinstance(value, np.ndarray):
            if value.nbytes > _LARGEST_ARRAY or value.dtype == object:
                raise TooLargeError
            return Frozen(value=value, kind=type(value), array=value.copy())
        if is_watched(value) or (isinstance(value, Tensor) and not is_real(value)):
            return Frozen(value=None, kind=object)  # an input of the graph
        parts = None if is_plain(value) else contents(value)
        if parts is None or id(value) in self._inside:
            if not is_plain(value) and parts is None:
                self.meet(value, text)
            return Frozen(value=value, kind=type(value))
        self.budget -= len(parts)
        if self.budget < 0:
            raise TooLargeError
        self._inside.append(id(value))
        frozen = {key: self.freeze(part, f"{text}[{key!r}]") for key, part in parts.items()}
        self._inside.pop()
        return Frozen(value=value, kind=type(value), parts=frozen)


def frozen_value(value: Any, text: str) -> Frozen:
    """The value as it is now, followed no further; one that is too large is compared by identity."""
    try:
        return Freezer(lambda met, at: None).freeze(value, text)
    except TooLargeError:
        return Frozen(value=value, kind=type(value))


def contents(value: Any) -> dict[Any, Any] | None:
    """The entries of a container by key or position; None for what is no container."""
    if isinstance(value, dict):
        parts = dict((OrderedDict if isinstance(value, OrderedDict) else dict).items(value))
        extra = {} if type(value) in (dict, OrderedDict) else attributes_of(value)
        return parts | {("attribute", name): part for name, part in extra.items()}
    if isinstance(value, (list, tuple)):
        return dict(enumerate(list.__iter__(value) if isinstance(value, list) else value))
    if isinstance(value, (set, frozenset, deque)):
        return dict(enumerate(value if isinstance(value, deque) else sorted(value, key=repr)))
    if isinstance(value, partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, (types.SimpleNamespace, types.MappingProxyType)):
        return dict(vars(value) if isinstance(value, types.SimpleNamespace) else value)
    return None


def shown(value: Any) -> str:
    """A value in a message: short."""
    if value is MISSING:
        return "missing"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value) if is_plain(value) else f"{type(value).__name__}"
    return text if len(text) < 60 else text[:57] + "..."
