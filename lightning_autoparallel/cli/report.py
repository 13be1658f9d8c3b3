"""How the command line ends after an error: one message for the package's own, a traceback for bugs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from lightning_autoparallel.errors import AutoParallelError

TRACEBACK_VARIABLE = "LIGHTNING_AUTOPARALLEL_TRACEBACK"


def report_errors(run: Callable[[], object]) -> int:
    """Call `run` and return the exit status: 0, or 1 after an AutoParallelError, printed without its traceback.

    Errors of other kinds pass through: they are bugs, and their traceback is what is wanted.
    """
    try:
        run()
    except Exception as error:
        ours = _package_error(error)
        if ours is None or os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        print(f"{_rank_prefix()}{type(ours).__name__}: {ours}", file=sys.stderr)
        print(f"{_rank_prefix()}(set {TRACEBACK_VARIABLE}=1 for the traceback)", file=sys.stderr, flush=True)
        return 1
    return 0


def _package_error(error: BaseException | None) -> AutoParallelError | None:
    """The error itself or the one it was raised from: compilers wrap what is raised below them."""
    while error is not None and not isinstance(error, AutoParallelError):
        error = error.__cause__
    return error


def _rank_prefix() -> str:
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    return "" if rank == "0" else f"[rank {rank}] "
