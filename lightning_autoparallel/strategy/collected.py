"""Whether evaluation steps, and the hooks behind them, keep what they see in attributes.

Rows that every rank evaluates are then kept by every rank, and none but the user's code knows which to leave out.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import nn

from lightning_autoparallel.lightning_compat import Trainer, is_of_lightning

_GROW = {"append", "extend", "appendleft", "insert", "add_"}
_MAY_GROW = {"add", "update"}  # of sets and dicts, and of metrics, too
_CONTAINERS = (dict, set)


def collects(trainer: Trainer) -> bool:
    """Whether the module, or a callback of the user's, collects by itself in the evaluation that is set up.

    Told from their code: ``self.seen.append(...)``, ``self.right += ...``, ``self.found[name] = ...``, in the step, the
    hook ``on_..._batch_end``, and methods that these call. Metrics are counted by those who know them.
    """
    kind = "test" if trainer.testing else "validation"
    module, hook = trainer.lightning_module, f"on_{kind}_batch_end"
    owners: list[tuple[Any, str]] = [(module, f"{kind}_step"), (module, hook)]
    owners += [(callback, hook) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    return any(_Reader(owner, module).keeps(name) for owner, name in owners)


class _Reader:
    """Reads methods of a module or a callback."""

    def __init__(self, owner: Any, module: nn.Module) -> None:
        self._owner, self._module = owner, module
        self._read: set[Any] = set()

    def keeps(self, name: str) -> bool:
        """Whether its method of this name, or one that it calls, grows what it or the module holds."""
        method = getattr(self._owner, name, None)
        return self._keeps(getattr(method, "__func__", method))

    def _keeps(self, given: Any) -> bool:
        function = inspect.unwrap(given) if callable(given) else None
        if not inspect.isfunction(function) or function in self._read or is_of_lightning(function.__module__):
            return False
        self._read.add(function)
        tree = _tree(function.__code__)
        if tree is None:
            return False
        names = [argument.arg for argument in tree.args.args]
        holders = dict(zip(names, (self._owner,), strict=False))
        if self._owner is not self._module and len(names) > 2:
            holders[names[2]] = self._module  # of a callback's hook
        return any(self._grows(node, holders) for node in ast.walk(tree))

    def _grows(self, node: ast.AST, holders: dict[str, Any]) -> bool:
        if isinstance(node, ast.AugAssign):
            return not isinstance(node.value, ast.Constant) and _held(node.target, holders) is not None
        if isinstance(node, ast.Assign):
            return any(_adds_to(target, node.value, holders) for target in node.targets)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        receiver, method = node.func.value, node.func.attr
        if isinstance(receiver, ast.Name) and holders.get(receiver.id) is self._owner:
            return self.keeps(method)
        if isinstance(receiver, ast.Call) and getattr(receiver.func, "id", "") == "super":
            return any(map(self._keeps, _inherited(self._owner, method)))
        held = _held(receiver, holders)
        if held is None or method not in _GROW | _MAY_GROW:
            return False
        value = getattr(*held, None)
        return isinstance(value, _CONTAINERS) if method in _MAY_GROW else not isinstance(value, nn.Module)


@lru_cache(maxsize=256)
def _tree(code: CodeType) -> ast.FunctionDef | None:
    """What was written; None where nobody can read it."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def _inherited(owner: Any, name: str) -> list[Any]:
    """What ``super().name`` may be."""
    return [vars(kind)[name] for kind in type(owner).__mro__ if name in vars(kind)]


def _held(part: ast.AST, holders: dict[str, Any]) -> tuple[Any, str] | None:
    """Of ``self.found["a"].rows`` who holds it and under which name, here ``found``; None where it is no holder's."""
    while isinstance(part, (ast.Attribute, ast.Subscript)):
        inner = part.value
        if isinstance(inner, ast.Name) and inner.id in holders and isinstance(part, ast.Attribute):
            return holders[inner.id], part.attr
        part = inner
    return None


def _adds_to(target: ast.AST, value: ast.AST, holders: dict[str, Any]) -> bool:
    """Whether an assignment keeps what was there before: of an entry, or of a value made of the earlier one."""
    held = _held(target, holders)
    if held is None or isinstance(target, ast.Subscript):
        return held is not None
    return any(_held(part, holders) == held for part in ast.walk(value) if isinstance(part, ast.Attribute))
