"""The cases by topic, and all of them by name."""

from __future__ import annotations

import importlib
import pkgutil

from tests.semantics.base import Case


def all_cases() -> dict[str, type[Case]]:
    """Every case, by `file.Class`; what begins with an underscore is shared by cases."""
    found: dict[str, type[Case]] = {}
    for file in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        module = importlib.import_module(f"{__name__}.{file}")
        for name, value in vars(module).items():
            mine = isinstance(value, type) and issubclass(value, Case) and value.__module__ == module.__name__
            if mine and not name.startswith("_"):
                found[f"{file}.{name}"] = value
    return found
