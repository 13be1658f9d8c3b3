"""The subcommand ``bench``: this strategy beside Lightning's own, measured in fresh processes on one machine."""

from lightning_autoparallel.cli.bench.command import BENCH, run_bench
from lightning_autoparallel.cli.bench.options import add_bench_arguments

__all__ = ["BENCH", "add_bench_arguments", "run_bench"]
