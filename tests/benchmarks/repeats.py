"""Plan ``auto`` for 8, 32 and 126 layers of LLaMA-3 8B's width: the size of the problem, and the seconds of solving it.

    python -m tests.benchmarks.repeats [--layers N ...] [--ranks N]

Equal blocks decide alike, so that both should be the same at any depth. Each is planned by the subcommand `plan` in a
process of its own, on the recipe's mesh.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lightning_autoparallel.contracts import SolvedProblem


def solved(layers: int, ranks: int) -> SolvedProblem:
    """What the subcommand reports of so many layers.

    Raises:
        RuntimeError: the subcommand fails, or reports nothing of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "report.json"
        command = [sys.executable, "-m", "lightning_autoparallel.cli.main", "plan", "--config", "llama3/8b"]
        command += ["--world-size", str(ranks), "--strategy.plan", "auto", "--output", str(output)]
        command += ["--model.init_args.overrides", json.dumps({"n_layers": layers})]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = json.loads(output.read_text(encoding="utf-8"))["solved"] if output.exists() else None
    if found is None:
        raise RuntimeError(f"nothing is reported of what was solved for {layers} layers: {done.stderr[-500:]}")
    return SolvedProblem(**{name: value for name, value in found.items() if name != "gap"})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32, 126])
    parser.add_argument("--ranks", type=int, default=128)
    given = parser.parse_args(arguments)
    first: SolvedProblem | None = None
    for layers in given.layers:
        found = solved(layers, given.ranks)
        first = first or found
        ratio = found.seconds / first.seconds if first.seconds else float("nan")
        print(
            f"{layers:>4} layers  {found.columns:>6} columns  {found.rows:>6} rows  {found.seconds:.1f} s  "
            f"{ratio:.2f} times the first",
            flush=True,
        )


if __name__ == "__main__":
    main()
