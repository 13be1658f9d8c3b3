"""The one writer of dumps: graphs before and after each pass, plans, reports."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import fx


def to_json(value: Mapping[str, Any]) -> str:
    """The text of a JSON file; what is infinite is null there, of which JSON has no number."""
    return json.dumps(_finite(value), indent=2, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class ArtifactWriter:
    """Writes under ``directory``, or nowhere when that is None."""

    def __init__(self, directory: str | Path | None) -> None:
        self._directory = None if directory is None else Path(directory)

    @property
    def writes(self) -> bool:
        """Whether there is a directory: what is dear to make need not be made for nothing."""
        return self._directory is not None

    def text(self, name: str, content: str) -> None:
        """Write ``content`` to the file ``name`` below the directory."""
        if self._directory is not None:
            path = self._directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")

    def graph(self, name: str, graph_module: fx.GraphModule) -> None:
        """Write a graph as readable Python with shapes."""
        if self._directory is not None:
            self.text(f"{name}.py.txt", graph_module.print_readable(print_output=False))

    def record(self, name: str, value: Mapping[str, Any]) -> None:
        """Write numbers, strings, lists and mappings as JSON."""
        if self._directory is not None:
            self.text(f"{name}.json", to_json(value))
