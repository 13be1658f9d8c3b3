"""Plans that are written by hand, as files that lie over a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_TIED = ("llama3/1b",)


def rules_file(recipe: str) -> Path:
    """The rules for tensor and sequence parallelism of a Llama 3 recipe, on top of plan ``fsdp``."""
    name = "llama3_tied_rules" if recipe in _TIED else "llama3_rules"
    return Path(__file__).with_name(f"{name}.yaml")


def by_rules(recipe: str) -> list[str]:
    """Arguments of the command line: the recipe with its rules."""
    return ["--config", recipe, "--config", str(rules_file(recipe))]


def rules_of(recipe: str) -> dict[str, Any]:
    """The rules as a plan has them."""
    rules: dict[str, Any] = yaml.safe_load(rules_file(recipe).read_text())["strategy"]["plan"]["rules"]
    return rules
