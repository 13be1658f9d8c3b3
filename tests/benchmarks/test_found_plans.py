"""Which plans are compared with each other, and what is said of all comparisons."""

from __future__ import annotations

import math

import pytest

from tests.benchmarks.found_plans import Comparison, cells, compared, summary

ONE_AXIS = {("shard8", "ddp"), ("shard8", "fsdp"), ("shard8", "auto")}
TWO_AXES = {("replicate8xshard8", "hsdp"), ("replicate8xshard8", "auto")}
TP = {("shard8xtp8", None), ("shard8xtp8", "auto")}


def meshes_of(recipe: str, ranks: int, rows: int) -> set[tuple[str, str | None]]:
    found = list(cells(recipe, ranks, rows))
    assert len({cell.rows * ranks // cell.mesh.get("tp", 1) for cell in found}) == 1, "all see the same rows"
    named = {
        ("x".join(f"{name.removeprefix('dp_')}{size}" for name, size in cell.mesh.items()), cell.plan) for cell in found
    }
    assert len(named) == len(found)
    return named


@pytest.mark.parametrize(
    ("recipe", "ranks", "rows", "expected"),
    [
        ("llama3/debug", 8, 8, ONE_AXIS),
        ("llama3/1b", 64, 1, {("shard64", plan) for plan in ("ddp", "fsdp", "auto")} | TWO_AXES),
        ("llama3/8b", 64, 1, TP),  # less than a row for each rank of one axis
        ("llama3/8b", 64, 8, {*TP, *TWO_AXES, *(("shard64", plan) for plan in ("ddp", "fsdp", "auto"))}),
    ],
)
def test_what_is_compared(recipe: str, ranks: int, rows: int, expected: set[tuple[str, str | None]]) -> None:
    assert meshes_of(recipe, ranks, rows) == expected


def test_what_is_found_is_compared_with_the_best_of_all_and_of_its_own_mesh() -> None:
    by_mesh = {("one", True): 8.0, ("one", False): 10.0, ("two", True): 9.0, ("two", False): 6.0, ("three", True): 5.0}
    assert compared(by_mesh) == Comparison(ratio=5 / 6, worst=9 / 6)
    assert compared({("one", True): 8.0}) is None


def test_where_only_others_fit_what_is_found_is_slower() -> None:
    assert compared({("one", False): 8.0}) == Comparison(ratio=math.inf, worst=math.inf)
    assert compared({("one", False): 8.0, ("two", True): 4.0}) == Comparison(ratio=0.5, worst=math.inf)


def test_the_last_line_counts_what_was_compared() -> None:
    ratios = [1.0004, 1.001, 0.95, 0.9504, 0.5, math.inf]
    comparisons = [Comparison(ratio=ratio, worst=max(ratio, 0.7)) for ratio in ratios]
    comparisons.append(Comparison(ratio=0.9, worst=1.2))
    said = "7 comparisons: auto is slower in 2 (on some mesh in 3), at least 5 % faster in 3"
    assert summary([*comparisons, None]) == said
    assert summary([None]).startswith("0 comparisons: auto is slower in 0")
