"""The subcommand ``bench``: this strategy beside Lightning's own, measured in fresh processes on one machine."""

from lightning_autoparallel.cli.bench.bench_options import add_bench_arguments
from lightning_autoparallel.cli.bench.command import BENCH, run_bench

__all__ = ["BENCH", "add_bench_arguments", "run_bench"]
