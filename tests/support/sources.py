"""The package's source files as syntax trees, and the imports in them with relative names resolved."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "lightning_autoparallel"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file: its path below the project root, its text and its tree."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def package(self) -> list[str]:
        """Names of the packages that hold the file, which a relative import starts from."""
        return list(Path(self.path).parent.parts)

    @property
    def part(self) -> str:
        """The file's or folder's name on the ladder: `mesh`, `capture`; `__init__` for the package's own file."""
        return Path(self.path).parts[1].removesuffix(".py")


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported name: its line and its absolute dotted name, with what is taken from the module at its end."""

    line: int
    name: str


def package_sources() -> list[Source]:
    """All Python files of the package."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    return [Source(path=str(file.relative_to(ROOT)), text=file.read_text(encoding="utf-8")) for file in files]


def imports_of(source: Source) -> Iterator[Import]:
    """Every import of the file, those inside functions and for type checkers too."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (Import(line=node.lineno, name=alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = source.package[: len(source.package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield from (Import(line=node.lineno, name=f"{base}.{alias.name}") for alias in node.names)


def torch_attributes_of(source: Source) -> Iterator[Import]:
    """Every `torch.a.b` that is spelt out in an expression, as if it had been imported."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and (name := _dotted(node)) and name.startswith("torch."):
            yield Import(line=node.lineno, name=name)


def _dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (start := _dotted(node.value)):
        return f"{start}.{node.attr}"
    return None
