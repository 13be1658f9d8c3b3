"""Predicted throughput and memory beside what torchtitan has published for Llama 3.1 on H100.

    python -m tests.benchmarks.published [--hardware NAME] [CASE ...]

Each case is planned by the subcommand `plan` in a process of its own, on `h100-96gb-500w` unless another hardware is
given, by rules on tp. Published are tokens per second and GPU, and for two cases GiB that were reserved: sequences of
8192, selective checkpointing, for 70B full, `torch.compile`; "async TP" sends gathers and scatters beside
tensor-parallel products in parts (torchtitan, docs/performance.md and benchmarks/ of 2024-12 and 2025-06).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.plans import by_rules

HARDWARE = "h100-96gb-500w"
WHOLE, IN_PARTS = ("--strategy.decompose_matmuls", "never"), ("--strategy.decompose_matmuls", "auto")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A published figure: what was run there, and what came of it."""

    recipe: str
    ranks: int
    rows: int  # per data-parallel rank
    options: tuple[str, ...]
    tokens_per_second: float  # and GPU
    memory_gib: float | None = None

    def arguments(self, hardware: str, output: Path) -> list[str]:
        """Of the subcommand."""
        return [
            *("plan", *by_rules(self.recipe), "--world-size", str(self.ranks), "--hardware", hardware),
            *("--data.init_args.batch_size", str(self.rows), "--output", str(output), *self.options),
            *("--strategy.loss_chunks", "1"),  # which torchtitan did not compute in chunks
        ]


FSDP = ("--strategy.plan", "fsdp", "--strategy.mesh", "{dp_shard: -1}")
FULL = ("--strategy.activation_checkpointing", "full")
CASES: Mapping[str, Case] = {
    "8B on 8": Case(recipe="llama3/8b", ranks=8, rows=2, options=FSDP, tokens_per_second=6667, memory_gib=77.0),
    "8B on 128": Case(recipe="llama3/8b", ranks=128, rows=2, options=FSDP, tokens_per_second=6514, memory_gib=62.0),
    "8B on 8 x TP 8": Case(recipe="llama3/8b", ranks=64, rows=12, options=WHOLE, tokens_per_second=4378),
    "8B on 8 x async TP 8": Case(recipe="llama3/8b", ranks=64, rows=12, options=IN_PARTS, tokens_per_second=4809),
    "70B on 32 x TP 8": Case(recipe="llama3/70b", ranks=256, rows=16, options=(*FULL, *WHOLE), tokens_per_second=597.3),
    "70B on 32 x async TP 8": Case(
        recipe="llama3/70b", ranks=256, rows=16, options=(*FULL, *IN_PARTS), tokens_per_second=652.4
    ),
}


def planned(case: Case, hardware: str) -> dict[str, Any]:
    """The report of ``plan``.

    Raises:
        subprocess.CalledProcessError: it failed; its output is in the error.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "report.json")
        command = [sys.executable, "-m", "lightning_autoparallel.cli.main", *case.arguments(hardware, output)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        found: dict[str, Any] = json.loads(output.read_text())
    return found


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One thing that is predicted and published, both in ``unit``."""

    unit: str
    predicted: float
    published: float

    @property
    def ratio(self) -> float:
        """Above 1 where more is predicted."""
        return self.predicted / self.published

    def __str__(self) -> str:
        return f"predicted {self.predicted:,.1f} {self.unit}, published {self.published:,.1f}: {self.ratio:.3f}"


def figures_of(case: Case, report: Mapping[str, Any]) -> list[Figure]:
    """Throughput, and memory where that is published."""
    tokens = report["tokens_per_second_per_device"]
    found = [Figure(unit="tokens per second and GPU", predicted=tokens, published=case.tokens_per_second)]
    if case.memory_gib is not None:
        gib = report["training_peak_bytes"] * (1 + (report["hardware"]["reserved_share"] or 0.0)) / 2**30
        found.append(Figure(unit="GiB reserved", predicted=gib, published=case.memory_gib))
    return found


def main(arguments: Sequence[str]) -> None:
    """Print the lines of every case that is wanted."""
    parser = argparse.ArgumentParser(prog="tests.benchmarks.published")
    parser.add_argument("--hardware", default=HARDWARE)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    given = parser.parse_args(arguments)
    for name in given.cases:
        for figure in figures_of(CASES[name], planned(CASES[name], given.hardware)):
            print(f"{name}: {figure}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
