"""The console script: `lightning-autoparallel fit --config RECIPE`."""

from __future__ import annotations

import gc
import sys

from lightning_autoparallel.cli.app import AutoParallelCLI
from lightning_autoparallel.cli.report import report_errors
from lightning_autoparallel.cli.tools import TOOLS
from lightning_autoparallel.lightning_compat.cli import ArgsType
from lightning_autoparallel.strategy import AutoParallelStrategy


def main(args: ArgsType = None) -> int:
    """Run one subcommand and return the exit status: 0, or 1 after an error of this package.

    Raises:
        SystemExit: a mistake in the arguments or the recipe, with status 2 and a message that says what was meant.
    """
    given = sys.argv[1:] if args is None else args
    if isinstance(given, list) and given and given[0] in TOOLS:
        return report_errors(lambda: TOOLS[given[0]].run(given[1:]))
    return report_errors(lambda: AutoParallelCLI(AutoParallelStrategy, args=args))


def console() -> int:
    """``main`` of a process that ends with it."""
    status = main()
    if sys.argv[1:2] == ["plan"]:
        gc.freeze()  # graphs go with the process: to look for cycles among them first takes seconds
    return status


if __name__ == "__main__":
    sys.exit(console())
