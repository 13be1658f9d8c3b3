"""Sizes, annotations, docstrings and the few habits that are never right, checked on every file of the package."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.support.sources import PACKAGE, Source, package_sources

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
BROAD = {"Exception", "BaseException"}

Rule = Callable[[Source], Iterable[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def long_files(source: Source) -> Iterable[str]:
    """Files over the limit."""
    lines = len(source.text.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{source.path}: {lines} lines"


def long_functions(source: Source) -> Iterable[str]:
    """Functions over the limit, with their decorators not counted."""
    for node in _functions(source):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield f"{source.path}:{node.lineno}: {node.name} has {lines} lines"


def missing_annotations(source: Source) -> Iterable[str]:
    """Arguments and results without a type; `self` and `cls` need none."""
    for node in _functions(source):
        spec = node.args
        named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
        bare = [arg.arg for arg in named if arg and arg.annotation is None and arg.arg not in {"self", "cls"}]
        if bare or node.returns is None:
            yield f"{source.path}:{node.lineno}: {node.name}: {', '.join(bare) or 'result'}"


def missing_docstrings(source: Source) -> Iterable[str]:
    """Modules, and public functions and classes at their top level, without a docstring."""
    if source.text.strip() and not ast.get_docstring(source.tree):
        yield f"{source.path}: module"
    for node in source.tree.body:
        is_public = isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")
        if is_public and not ast.get_docstring(node):
            yield f"{source.path}:{node.lineno}: {node.name}"


def swallowed_exceptions(source: Source) -> Iterable[str]:
    """Handlers that catch everything and do nothing."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and _does_nothing(node.body):
            yield f"{source.path}:{node.lineno}"


def global_state(source: Source) -> Iterable[str]:
    """`global` statements."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield f"{source.path}:{node.lineno}: {', '.join(node.names)}"


def _functions(source: Source) -> Iterable[Function]:
    return (node for node in ast.walk(source.tree) if isinstance(node, Function))


def _is_broad(caught: ast.expr | None) -> bool:
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in BROAD) for kind in kinds)


def _does_nothing(body: list[ast.stmt]) -> bool:
    return all(
        isinstance(node, (ast.Pass, ast.Continue))
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in body
    )


RULES = [long_files, long_functions, missing_annotations, missing_docstrings, swallowed_exceptions, global_state]
GOOD = '''"""A module."""
def f(x: int, *rest: int) -> int:
    """Add."""
    try:
        return x
    except Exception as error:
        raise ValueError("what to do") from error
class _Hidden:
    def method(self, y: str) -> None: ...
'''


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule: Rule):
    assert [place for source in package_sources() for place in rule(source)] == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (long_files, "x = 1\n" * (MAX_FILE_LINES + 1)),
        (long_functions, "def f() -> None:\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
        (missing_annotations, "def f(x) -> None: ..."),
        (missing_annotations, "def f(x: int): ..."),
        (missing_annotations, "class A:\n    async def f(self, **kw) -> None: ..."),
        (missing_docstrings, "x = 1"),
        (missing_docstrings, '"""A module."""\ndef f() -> None: ...'),
        (missing_docstrings, '"""A module."""\nclass A: ...'),
        (swallowed_exceptions, "try: f()\nexcept Exception: pass"),
        (swallowed_exceptions, "try: f()\nexcept: ..."),
        (swallowed_exceptions, "for x in y:\n    try: f()\n    except (ValueError, BaseException): continue"),
        (global_state, "def f():\n    global x\n    x = 1"),
    ],
)
def test_each_rule_can_fail(rule: Rule, text: str):
    assert len(list(rule(Source(path=f"{PACKAGE}/mesh.py", text=text)))) == 1


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_good_code_passes(rule: Rule):
    assert list(rule(Source(path=f"{PACKAGE}/mesh.py", text=GOOD))) == []


def shared_names(paths: Iterable[str]) -> list[str]:
    """Names that several files have: each is to say one thing in the whole package."""
    names = Counter(Path(path).name for path in paths)
    return [name for name, count in names.items() if count > 1 and name != "__init__.py"]


def test_a_file_name_says_one_thing():
    assert shared_names(source.path for source in package_sources()) == []
    assert shared_names(["a/__init__.py", "b/__init__.py", "a/steps.py", "b/c/steps.py"]) == ["steps.py"]
