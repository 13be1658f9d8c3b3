"""Train third-party models on all sides and print a line for each.

    python -m tests.thirdparty.table [--oracles] [--tp | --gpu] [--trace] [NAME ...]

A name is `library/model` or the beginning of several. `--oracles` leaves this package out and compares DDP with one
device, which says whether a case is sound; `--tp` trains on four ranks of two axes, `--gpu` on one GPU; `--trace` adds
tracebacks.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

from tests.thirdparty.compare import LIMIT_S, Row, run_case, run_oracles
from tests.thirdparty.registry import builders, missing


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[""])
    parser.add_argument("--oracles", action="store_true")
    on = parser.add_mutually_exclusive_group()
    on.add_argument("--tp", action="store_const", const="tp", dest="side", default="ours")
    on.add_argument("--gpu", action="store_const", const="gpu", dest="side")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    chosen = parser.parse_args()
    run = run_oracles if chosen.oracles else partial(run_case, side=chosen.side)
    rows: list[Row] = []
    for name in builders():
        if name.startswith(tuple(chosen.names)):
            start = time.monotonic()
            rows.append(run(name, chosen.limit_s))
            print(f"{rows[-1]}  [{time.monotonic() - start:.0f} s]", flush=True)
            if chosen.trace and rows[-1].trace:
                print(rows[-1].trace, flush=True)
    print(summary(rows))
    if missing():
        print("not installed:", ", ".join(missing()))


def summary(rows: list[Row]) -> str:
    """How many trained, and how."""
    trained = [row for row in rows if not row.error]
    modes = {mode: sum(row.mode == mode for row in trained) for mode in sorted({row.mode for row in trained})}
    different = [row.name for row in trained if not row.passed]
    said = ", ".join(f"{count} {mode}" for mode, count in modes.items())
    return f"{len(rows)} models: {len(trained)} trained ({said}), different: {', '.join(different) or 'none'}"


if __name__ == "__main__":
    main()
