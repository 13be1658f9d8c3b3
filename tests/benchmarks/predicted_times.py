"""Steps as they are predicted with rates that `calibrate` has measured here, beside a clock's.

    python -m tests.benchmarks.predicted_times [--ranks 2] [--mbit 400] [--workloads NAME ...] [--plans NAME ...]
        [--within RATIO]

First `calibrate` runs on the same ranks and link (or the rates that it left before are read), then every workload under
every plan, compiled, each in fresh processes, in turns, round by round: what disturbs this machine for a while disturbs
one round of all of them. With `--mbit` half of the ranks run on each of two network namespaces
(`slow_link.py`). A ratio is measured / predicted; rows of equal graphs ran the same calls in the same order, and differ
by measuring. With `--within` the status is 1, and a line names each, where a ratio is not between 1 / RATIO and RATIO,
or there is none. The status is 77 where no such link can be made.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lightning_autoparallel.cli.bench.bench_options import cores
from lightning_autoparallel.cli.bench.measurements import OURS, Contender, Job, Measurement
from lightning_autoparallel.cli.bench.processes import Host, MeasurementError, ended_by_signals, measure, run_ranks
from lightning_autoparallel.cli.bench.table import first_line
from tests.benchmarks import workloads
from tests.benchmarks.namespaces import NotAllowedError, slow_link
from tests.benchmarks.slow_link import SKIPPED
from tests.benchmarks.step_time import show

HEADER = ("workload", "plan", "measured ms", "of rounds", "predicted ms", "ratio", "graphs")
_LIMIT_S = 900.0


def calibrate(arguments: argparse.Namespace, folder: Path, rates: str, hosts: Sequence[Host]) -> None:
    """Write the file of rates of these ranks.

    Raises:
        MeasurementError: a rank failed.
    """
    command = [
        sys.executable,
        "-m",
        "lightning_autoparallel.cli.main",
        "calibrate",
        "--output",
        str(Path(rates).absolute()),
    ]
    codes = run_ranks(
        [*command, "--device", "cpu", "--threads", str(threads(arguments))],
        folder, arguments.ranks, threads(arguments), _LIMIT_S, hosts,
    )  # fmt: skip
    if not Path(rates).is_file() or any(codes):
        raise MeasurementError((folder / "rank0.log").read_text()[-2000:])


def measured(arguments: argparse.Namespace, name: str, plan: str, rates: str, hosts: Sequence[Host]) -> Measurement:
    """One workload under one plan.

    Raises:
        MeasurementError: a rank failed.
    """
    job = Job(
        config=workloads.config(name, plan, rates),
        contender=Contender(name=OURS),
        processes=arguments.ranks,
        warmup=arguments.warm_up,
        steps=arguments.steps,
    )
    return measure(job, threads=threads(arguments), limit_s=_LIMIT_S, hosts=hosts)


def threads(arguments: argparse.Namespace) -> int:
    """Of each rank."""
    return max(1, cores() // arguments.ranks)


def rows(arguments: argparse.Namespace, rates: str, hosts: Sequence[Host]) -> list[list[str]]:
    """A row of texts per workload and plan, as ``HEADER`` has them; each round's is printed as it ends."""
    found: dict[tuple[str, str], list[Measurement | MeasurementError]] = {}
    for turn, key in itertools.product(
        range(arguments.rounds), itertools.product(arguments.workloads, arguments.plans)
    ):
        try:
            outcome: Measurement | MeasurementError = measured(arguments, *key, rates, hosts)
        except MeasurementError as error:
            outcome = error
        print(f"round {turn + 1}/{arguments.rounds}", *row_of(key, [outcome]), sep="  ", file=sys.stderr, flush=True)
        found.setdefault(key, []).append(outcome)
    return [row_of(key, outcomes) for key, outcomes in found.items()]


def row_of(key: tuple[str, str], outcomes: Sequence[Measurement | MeasurementError]) -> list[str]:
    """The median of the rounds of one workload and plan beside what is predicted, or why a round failed."""
    failed = [first_line(str(outcome)) for outcome in outcomes if isinstance(outcome, MeasurementError)]
    if failed:
        return [*key, failed[0], "-", "-", "-", "-"]
    rounds = [outcome for outcome in outcomes if isinstance(outcome, Measurement)]
    times_ms = [outcome.step_ms for outcome in rounds]
    step_ms, predicted_ms = statistics.median(times_ms), rounds[0].predicted_ms
    shown = ["-", "-"] if predicted_ms is None else [f"{predicted_ms:.1f}", f"{step_ms / predicted_ms:.2f}"]
    return [*key, f"{step_ms:.1f}", f"{min(times_ms):.1f} .. {max(times_ms):.1f}", *shown, rounds[0].graphs or "-"]


def outside(table: Sequence[Sequence[str]], within: float) -> list[str]:
    """A line for each row, as ``HEADER`` has them, whose ratio is not from 1 / ``within`` to ``within``, or is none."""
    found = []
    for row in table:
        workload, plan, *_, ratio, _ = row
        if ratio == "-":
            found.append(f"{workload} under {plan}: nothing to compare")
        elif not 1 / within <= float(ratio) <= within:
            found.append(f"{workload} under {plan}: measured / predicted is {ratio}, not within {within:g} either way")
    return found


@contextlib.contextmanager
def _hosts(mbit: float | None, cache: Path) -> Iterator[list[Host]]:
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    if mbit is None:
        yield [Host(environment=kept)]
        return
    with slow_link(mbit) as pair:
        yield [replace(host, environment={**host.environment, **kept}) for host in pair]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes; with --mbit half of them on each host")
    parser.add_argument("--mbit", type=float, help="of the link, per direction; loopback without")
    parser.add_argument("--workloads", nargs="+", default=list(workloads.NAMES), choices=workloads.NAMES)
    parser.add_argument("--plans", nargs="+", default=["ddp", "fsdp", "tp"], choices=workloads.PLANS)
    parser.add_argument("--rates", help="a file of rates: where there is none, the calibrated ones are kept there")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each; medians are compared")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--within", type=_at_least_one, metavar="RATIO", help="fail where a ratio is farther from 1")
    return parser.parse_args(argv)


def _at_least_one(text: str) -> float:
    if not (ratio := float(text)) >= 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return ratio


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    arguments = parse(argv)
    table = [list(HEADER)]
    try:
        with ended_by_signals(), tempfile.TemporaryDirectory(prefix="autoparallel-predicted-") as name:
            folder = Path(name)
            with _hosts(arguments.mbit, folder / "inductor") as hosts:
                rates = arguments.rates or str(folder / "rates.yaml")
                if not Path(rates).is_file():
                    calibrate(arguments, folder, rates, hosts)
                table += rows(arguments, rates, hosts)
    except NotAllowedError as error:
        print(f"skipped: {error}", file=sys.stderr)
        return SKIPPED
    print(json.dumps(vars(arguments)), show(table), sep="\n")
    far = [] if arguments.within is None else outside(table[1:], arguments.within)
    print(*far, sep="\n", end="\n" if far else "")
    return int(bool(far))


if __name__ == "__main__":
    sys.exit(main())
