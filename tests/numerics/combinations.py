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


def covering_switches(switches: int, places: int) -> list[list[tuple[bool, ...]]]:
    """For each place two rows that say which switches are on, chosen so that with a row of none, every pair occurs.

    A switch's column is a word over all rows. Distinct words of equal weight differ both ways; of more than half the
    length, they are on together in some row; the row of none has every two of them off (Kleitman and Spencer 1973,
    "Families of k-independent sets"). A word that is off in both rows of a place is left out, so that every switch is
    on at every place.

    Raises:
        ValueError: the places are too few for so many switches.
    """
    weight = places + 1
    words = (word for word in itertools.product((True, False), repeat=2 * places) if sum(word) == weight)
    fitting = [word for word in words if all(word[2 * place] or word[2 * place + 1] for place in range(places))]
    if len(fitting) < switches:
        raise ValueError(f"{places} places tell {len(fitting)} switches apart, not {switches}: add a place")
    rows = list(zip(*fitting[:switches], strict=True))
    return [rows[2 * place : 2 * place + 2] for place in range(places)]
