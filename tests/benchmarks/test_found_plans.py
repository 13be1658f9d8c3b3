"""Which plans are compared with each other, and what is said of all comparisons."""

from __future__ import annotations

import pytest

from tests.benchmarks.found_plans import cells, summary

ONE_AXIS = {("shard8", "ddp"), ("shard8", "fsdp"), ("shard8", "auto")}
TWO_AXES = {("replicate8xshard8", "hsdp"), ("replicate8xshard8", "auto")}
TP = {("shard8xtp8", None), ("shard8xtp8", "auto")}


def compared(recipe: str, ranks: int, rows: int) -> set[tuple[str, str | None]]:
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
    assert compared(recipe, ranks, rows) == expected


def test_the_last_line_counts_what_was_compared() -> None:
    ratios = [1.0004, 1.001, None, 0.95, 0.951, 0.5]
    assert summary(ratios) == "5 comparisons: auto is slower in 1, at least 5 % faster in 2"
    assert summary([None]) == "0 comparisons: auto is slower in 0, at least 5 % faster in 0"
