"""Plans that are found beside those that have names or rules: predicted time and memory, by one set of rates.

    python -m tests.benchmarks.found_plans [--hardware NAME] [--ranks N ...] [--recipes NAME ...] [--rows N ...]

Every plan of a mesh is planned by the subcommand `plan` in a process of its own: on the recipe's mesh rules written by
hand and `auto`, on one axis `ddp`, `fsdp` and `auto`, on two dp axes `hsdp` and `auto`. Rows are those of each
data-parallel rank of the recipe's mesh: by default the recipe's own, and where that mesh has tp as many as its ranks,
which 405B has no memory for. Other meshes share out the same rows, where there is one for each rank. What does not fit
the device's memory is no plan. Beside the ranks that are asked for each recipe is planned at its own number of them.
The last line counts the comparisons, those in which auto is slower, and those in which it is 5 % faster at least.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_autoparallel.cost import hardware_from
from tests.support.plans import by_rules

AUTO = "auto"
_FASTER = 0.95  # times the best of the others


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """``tp`` of its mesh, the ``rows`` of each data-parallel rank, and the ``ranks`` that its file speaks of."""

    tp: int
    rows: tuple[int, ...]
    ranks: int


RECIPES = {
    "llama3/debug": Recipe(tp=1, rows=(8,), ranks=2),
    "llama3/1b": Recipe(tp=1, rows=(1,), ranks=8),
    "llama3/8b": Recipe(tp=8, rows=(1, 8), ranks=128),
    "llama3/70b": Recipe(tp=8, rows=(1, 8), ranks=256),
    "llama3/405b": Recipe(tp=8, rows=(1,), ranks=2048),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One plan of one recipe on a mesh of some ranks."""

    recipe: str
    ranks: int
    mesh: Mapping[str, int]
    plan: str | None  # None: rules written by hand
    rows: int

    def arguments(self, hardware: str, output: Path) -> list[str]:
        """Of the subcommand."""
        config = by_rules(self.recipe) if self.plan is None else ["--config", self.recipe]
        given = ["plan", *config, "--world-size", str(self.ranks), "--output", str(output)]
        given += ["--hardware", hardware, "--strategy.mesh", json.dumps(dict(self.mesh))]
        given += ["--data.init_args.batch_size", str(self.rows)]
        if self.plan == AUTO:  # as much as the others may take
            given += ["--strategy.memory_budget_gib", str(_memory_bytes(hardware) / 2**30)]
        return given if self.plan is None else [*given, "--strategy.plan", self.plan]

    def __str__(self) -> str:
        mesh = "x".join(f"{name.removeprefix('dp_')}{size}" for name, size in self.mesh.items())
        return f"{self.recipe:<13} {self.ranks:>5} {mesh:<22} {self.rows:>3} rows {self.plan or 'rules':<6}"


def cells(recipe: str, ranks: int, rows: int) -> Iterator[Cell]:
    """The plans of a recipe that are compared with each other: all see the same rows."""
    tp = min(RECIPES[recipe].tp, ranks)
    whole = {"dp_shard": ranks}
    if tp > 1:
        own = {"dp_shard": ranks // tp, "tp": tp}
        for plan in (None, AUTO):
            yield Cell(recipe=recipe, ranks=ranks, mesh=own, plan=plan, rows=rows)
        if rows % tp:
            return  # one axis would have less than a row for each rank
    for plan in ("ddp", "fsdp", AUTO):
        yield Cell(recipe=recipe, ranks=ranks, mesh=whole, plan=plan, rows=rows // tp)
    if ranks > 8:
        two = {"dp_replicate": ranks // 8, "dp_shard": 8}
        for plan in ("hsdp", AUTO):
            yield Cell(recipe=recipe, ranks=ranks, mesh=two, plan=plan, rows=rows // tp)


def report_of(cell: Cell, hardware: str) -> Mapping[str, Any] | str:
    """The subcommand's report, or the last line of what it says where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "report.json"
        command = [sys.executable, "-m", "lightning_autoparallel.cli.main", *cell.arguments(hardware, output)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not output.exists():
            return next((line for line in done.stderr.splitlines() if "Error" in line), done.stderr[-200:])
        report: Mapping[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return report


def _memory_bytes(hardware: str) -> int:
    return hardware_from(hardware).memory_bytes


def exposed_us(report: Mapping[str, Any]) -> float:
    """Of a step, the time in which nothing computes."""
    return sum(report[name]["exposed_us"] for name in ("forward", "backward"))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is found over the best of the others: with the best mesh of each, and on the mesh where that is most."""

    ratio: float
    worst: float


def compared(times_ms: Mapping[tuple[str, bool], float]) -> Comparison | None:
    """Of the best that fit, by mesh and whether they were found; infinite where only others fit, None where none do."""
    meshes = {mesh for mesh, is_found in times_ms if not is_found}
    if not meshes:
        return None
    found, others = (
        {mesh: time_ms for (mesh, is_found), time_ms in times_ms.items() if is_found == wanted}
        for wanted in (True, False)
    )
    return Comparison(
        ratio=min(found.values(), default=math.inf) / min(others.values()),
        worst=max(found.get(mesh, math.inf) / others[mesh] for mesh in meshes),
    )


def compare(recipe: str, ranks: int, rows: int, hardware: str) -> Comparison | None:
    """Print the plans of one recipe at so many ranks, and how what is found compares with the others."""
    times_ms: dict[tuple[str, bool], float] = {}
    for cell in cells(recipe, ranks, rows):
        report = report_of(cell, hardware)
        if isinstance(report, str):
            print(f"{cell}  none: {report[:150]}", flush=True)
            continue
        memory, room = report["training_peak_bytes"], hardware_from(hardware).usable_bytes(_memory_bytes(hardware))
        fits = memory is not None and memory <= room
        time_ms, exposed_ms = report["step_time_us"] / 1e3, exposed_us(report) / 1e3
        print(
            f"{cell} {time_ms:10.2f} ms {exposed_ms:9.2f} ms exposed {memory / 2**30:8.1f} GiB"
            f"{'' if fits else '  does not fit'}",
            flush=True,
        )
        if fits:
            key = json.dumps(cell.mesh), cell.plan == AUTO
            times_ms[key] = min(time_ms, times_ms.get(key, math.inf))
    comparison = compared(times_ms)
    if comparison is not None:
        print(
            f"{recipe:<13} {ranks:>5} auto / best of the others: {comparison.ratio:.3f}, "
            f"on the mesh where that is most {comparison.worst:.3f}\n",
            flush=True,
        )
    return comparison


def summary(comparisons: Sequence[Comparison | None]) -> str:
    """What all of them say; None where there was nothing to compare."""
    known = [one for one in comparisons if one is not None]
    slower = sum(round(one.ratio, 3) > 1 for one in known)
    on_a_mesh = sum(round(one.worst, 3) > 1 for one in known)
    faster = sum(one.ratio <= _FASTER for one in known)
    return (
        f"{len(known)} comparisons: auto is slower in {slower} (on some mesh in {on_a_mesh}), "
        f"at least 5 % faster in {faster}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan all that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 128, 512])
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--rows", type=int, nargs="+", help="of each data-parallel rank of the recipe's mesh")
    given = parser.parse_args(arguments)
    comparisons = [
        compare(recipe, ranks, rows, given.hardware)
        for recipe in given.recipes
        for ranks in sorted({*given.ranks, RECIPES[recipe].ranks})
        for rows in given.rows or RECIPES[recipe].rows
    ]
    print(summary(comparisons))


if __name__ == "__main__":
    main()
