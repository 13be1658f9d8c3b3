"""A tensor-parallel MLP over a slow network, its products decomposed, against all-gather + product + reduce-scatter.

    python -m tests.benchmarks.slow_matmul [--mbit 400] [--orders cyclic swizzle] [--rounds 9] [--hidden 0]

Two network namespaces are two hosts, joined by a link of `--mbit` megabits per second and direction (Linux, root,
iproute2), and two ranks run on each, one thread each. `x + relu(norm(x) @ up) @ down` is cut by rules, columns then
rows, with x and the result in shards of the sequence; it runs forward only and interpreted, through `parallelize`, as
it is and with `decompose_matmuls="always"`. Weights and rows are the same, whole results are compared first. Contenders
then take turns within the same processes. `--hidden 0` measures a product, and takes the width with which one product
lasts about as long as the gather takes over the link: where either takes far longer, there is little to hide.

`ms` are medians over rounds of the slowest rank's time; `sent` is what the busier host sends per step, counted by the
interface; `link` is how long that takes at the link's rate, at least; `CPU` is what all ranks compute together.
gloo's gather is a ring, in which the shards that cross the link are as many as with `cyclic`, and `swizzle`, which
sends each to both remote ranks, sends 4 / 3 as many. Its reduce-scatter sends twice what `cyclic` does, which is part
of the ratio to `whole`, all-gather + product + reduce-scatter; `exchanged` is what this strategy does without
decomposing, by the pass `exchange_reduce_scatters`. With `--gathers-only` all reduce-scatters are gloo's, and `cyclic`
sends as much as the whole. The status is 1 where the fastest order takes more than `LIMIT` of the whole's time or
results differ, and 77 where no such link can be made, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_autoparallel.cli.bench.processes import (
    Host,
    MeasurementError,
    ended_by_signals,
    failure,
    result_path,
    run_ranks,
)
from tests.benchmarks.namespaces import NotAllowedError, slow_link
from tests.benchmarks.slow_link import SKIPPED, link_time_ms
from tests.benchmarks.step_time import show

RANKS, LIMIT, TOLERANCE = 4, 0.8, 1e-5
WHOLE, EXCHANGED = "whole", "exchanged"
ORDERS = ("cyclic", "swizzle", "broadcast")
HEADER = ("contender", "ms", "min..max", "x whole", "sent MB", "link ms", "CPU ms", "launches", "difference")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One contender's rounds, as rank 0 wrote them: milliseconds, bytes, and the largest relative difference."""

    step_ms: list[float]
    sent_bytes: list[float]
    cpu_ms: list[float]
    launches: str
    difference: float

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)


@dataclass(frozen=True, kw_only=True)
class Results:
    """All contenders by name, the width that was taken, and the time of one product with it."""

    hidden: int
    product_ms: float
    contenders: dict[str, Measured]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=400.0, help="of the link, per direction")
    parser.add_argument("--orders", nargs="+", default=list(ORDERS), choices=ORDERS)
    parser.add_argument("--gathers-only", action="store_true", help="leave reduce-scatters whole")
    sizes = (("rounds", 9), ("warm-up", 2), ("rows", 4096), ("width", 1024), ("hidden", 0))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds after which the measurement is ended")
    parser.add_argument("--as-rank-in", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    for name in ("rows", "hidden"):
        if getattr(arguments, name) % RANKS:
            parser.error(f"--{name} {getattr(arguments, name)} do not divide over {RANKS} ranks")
    if arguments.mbit <= 0:
        parser.error(f"--mbit {arguments.mbit} is no rate")
    return arguments


def gather_ms(arguments: argparse.Namespace) -> float:
    """How long the link takes for a gathered sequence, of which each direction carries all shards but one."""
    shard = arguments.rows // RANKS * arguments.width * 4
    return link_time_ms((RANKS - 1) * shard, arguments.mbit)


def measure(arguments: argparse.Namespace, argv: Sequence[str], hosts: Sequence[Host]) -> Results:
    """Run all contenders in turn, in one set of fresh processes on ``hosts``.

    Raises:
        MeasurementError: a rank failed or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="autoparallel-slow-matmul-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tests.benchmarks.slow_matmul", *argv, "--as-rank-in", name]
        codes = run_ranks(command, folder, RANKS, 1, arguments.limit_s, hosts)
        if not result_path(folder, 0).is_file():
            raise MeasurementError(failure(folder, codes))
        return read(result_path(folder, 0).read_text())


def read(text: str) -> Results:
    """What `write` wrote."""
    given = json.loads(text)
    measured = {name: Measured(**one) for name, one in given.pop("contenders").items()}
    return Results(**given, contenders=measured)


def write(results: Results) -> str:
    """JSON of what was measured."""
    return json.dumps(asdict(results))


def rows(results: Results, mbit: float) -> list[list[str]]:
    """Rows below `HEADER`."""
    return [_row(name, one, results.contenders[WHOLE], mbit) for name, one in results.contenders.items()]


def _row(name: str, measured: Measured, whole: Measured, mbit: float) -> list[str]:
    sent = statistics.median(measured.sent_bytes)
    return [
        name,
        f"{measured.median_ms:.1f}",
        f"{min(measured.step_ms):.1f}..{max(measured.step_ms):.1f}",
        f"{measured.median_ms / whole.median_ms:.2f}",
        f"{sent / 1e6:.1f}",
        f"{link_time_ms(sent, mbit):.1f}",
        f"{statistics.median(measured.cpu_ms):.1f}",
        measured.launches,
        f"{measured.difference:.0e}",
    ]


def fastest(results: Results) -> tuple[str, float]:
    """The order whose median is the least, and its share of the whole's."""
    medians = {name: one.median_ms for name, one in results.contenders.items() if name in ORDERS}
    best = min(medians, key=medians.__getitem__)
    return best, medians[best] / results.contenders[WHOLE].median_ms


def report(arguments: argparse.Namespace, results: Results) -> str:
    """What is printed at the end; the last line has both sides and their ratio."""
    whole, (best, ratio) = results.contenders[WHOLE], fastest(results)
    title = (
        f"MLP {arguments.width} -> {results.hidden} -> {arguments.width}, {arguments.rows} rows, float32, forward, "
        f"interpreted; {RANKS} ranks over gloo, two hosts, {arguments.mbit:g} mbit/s; {arguments.rounds} rounds "
        f"in turn after {arguments.warm_up}; a product {results.product_ms:.1f} ms, a gather over the link "
        f"{gather_ms(arguments):.1f} ms at least; load {os.getloadavg()[0]:.1f}"
    )
    verdict = (
        f"decomposed ({best}) {results.contenders[best].median_ms:.1f} ms, whole {whole.median_ms:.1f} ms, "
        f"ratio {ratio:.2f} (at most {LIMIT})"
    )
    return "\n".join([title, show([list(HEADER), *rows(results, arguments.mbit)]), verdict])


def is_met(results: Results) -> bool:
    """Whether the fastest order is fast enough, and all results are alike."""
    return fastest(results)[1] <= LIMIT and all(one.difference <= TOLERANCE for one in results.contenders.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print, or be one rank of a measurement; the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parse(given)
    if arguments.as_rank_in:
        from tests.benchmarks.slow_matmul_rank import run  # torch is for ranks only

        run(arguments)
        return 0
    try:
        with ended_by_signals(), slow_link(arguments.mbit) as hosts:
            results = measure(arguments, given, hosts)
    except NotAllowedError as error:
        print(f"skipped: {error}", file=sys.stderr)
        return SKIPPED
    print(report(arguments, results))
    return int(not is_met(results))


if __name__ == "__main__":
    sys.exit(main())
