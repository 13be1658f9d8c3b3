"""``float`` and ``int`` for functions of the user's files, so that a converted number stays an expression.

They take the place of the builtins in the globals of a file that only calls them, or asks ``isinstance``.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

from lightning_autoparallel.capture.watch import is_watched, symbolic

_NAMES = ("float", "int")


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


CONVERTERS = {"float": _Float, "int": _Int}


@cache
def only_called(filename: str) -> frozenset[str]:
    """The builtins among ``float`` and ``int`` that a source file calls and does nothing else with."""
    try:
        tree = ast.parse(Path(filename).read_text())
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    harmless = {id(node) for owner in ast.walk(tree) for node in _harmless(owner)}
    used = {
        name: [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name] for name in _NAMES
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
