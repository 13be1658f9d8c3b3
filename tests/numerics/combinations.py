"""Choices among settings in which every pair of settings occurs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Settings = dict[str, Any]

# Words of even weight, each followed by its opposite: among the ten, two settings meet in every pair of values; one
# takes both values in every two, and in the turns 0, 4, 8 (and 1, 5, 9; 2, 6; 3, 7), which have a plan in common.
_TURNS = ("0000", "1111", "0110", "1001", "0101", "1010", "1001", "0110", "1010", "0101")


def every(options: Mapping[str, Sequence[Any]]) -> list[Settings]:
    """All combinations."""
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


def in_turn(options: Mapping[str, Sequence[Any]], turn: int, start: int = 0) -> Settings:
    """One value of each of four settings; ten turns from any start hold every pair of values."""
    bits = zip(_TURNS[turn % len(_TURNS)], _TURNS[start % len(_TURNS)], strict=True)
    return {name: values[one != other] for (name, values), (one, other) in zip(options.items(), bits, strict=True)}


def pairs(settings: Mapping[str, Any]) -> set[frozenset[tuple[str, Any]]]:
    """Every two of the settings."""
    return {frozenset(two) for two in itertools.combinations(settings.items(), 2)}
