"""``float``, ``int``, ``type`` and ``isinstance`` for functions of the user's files.

A converted number stays an expression, and the type of a stand-in is that of what it stands for. They take the place of
the builtins in the globals of a file that only calls them, or asks ``isinstance``.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_autoparallel.capture.leaf_stand_ins import Unread
from lightning_autoparallel.capture.stand_ins import DictStandIn, ListStandIn
from lightning_autoparallel.capture.watch import is_watched, symbolic
from lightning_autoparallel.torch_compat.tracing import plain_type, stands_for_parameter


class _Converter(type):
    """A class that converts as its base does, and is that base for ``isinstance`` and as a key."""

    real: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and is_watched(args[0]):
            return symbolic(cls.real.__name__, cls.real)(args[0])
        return cls.real(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.real)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.real)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.real

    def __hash__(cls) -> int:
        return hash(cls.real)


class _Float(float, metaclass=_Converter):
    real: Any = float  # type: ignore[assignment]


class _Int(int, metaclass=_Converter):
    real: Any = int  # type: ignore[assignment]


class _TypeConverter(_Converter):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _type_of(args[0]) if len(args) == 1 else cls.real(*args, **kwargs)

    def __getitem__(cls, item: Any) -> Any:
        return type[item]


class _Type(type, metaclass=_TypeConverter):
    real: Any = type


def _is_instance(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) or (stands_for_parameter(value) and issubclass(nn.Parameter, kinds))


CONVERTERS: dict[str, Any] = {"float": _Float, "int": _Int, "type": _Type, "isinstance": _is_instance}


def _type_of(value: Any) -> type:
    """The type that ``value`` has at a real step."""
    if isinstance(value, Tensor):
        return plain_type(value)
    if type(value) in (ListStandIn, DictStandIn):
        return list if type(value) is ListStandIn else dict
    return value.__class__ if is_watched(value) or type(value) is Unread else type(value)


@cache
def only_called(filename: str) -> frozenset[str]:
    """The builtins among ``CONVERTERS`` that a source file calls and does nothing else with."""
    try:
        tree = ast.parse(Path(filename).read_text())
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    harmless = {id(node) for owner in ast.walk(tree) for node in _harmless(owner)}
    used = {
        name: [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name] for name in CONVERTERS
    }
    return frozenset(name for name, nodes in used.items() if nodes and all(id(node) in harmless for node in nodes))


def _harmless(node: ast.AST) -> list[ast.AST]:
    """Names in ``node`` that are called, asked for by ``isinstance``, or part of an annotation."""
    if isinstance(node, ast.Call):
        is_question = isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        asked = [part for argument in node.args[1:] for part in ast.walk(argument)] if is_question else []
        return [node.func, *asked]
    annotations = [getattr(node, name, None) for name in ("annotation", "returns")]
    return [part for annotation in annotations if annotation is not None for part in ast.walk(annotation)]
