"""Step time over a slow network: this strategy with its passes and without, and Lightning's FSDP2, on two hosts.

    python -m tests.benchmarks.slow_link [--mbit 400] [--ranks 2] [--precision 32-true] [--rounds 3] [--steps 10]

Two network namespaces are two hosts, joined by a link of `--mbit` megabits per second and direction (Linux, root,
iproute2), and gloo trains over it; half of the ranks run on each. The model is Llama 3 over bytes of text, so large
and with so many tokens that a step computes about as long as its bytes take over the link. Contenders take turns, each
in fresh processes, with the same module, weights, rows and precision. FSDP2 and this strategy both gather parameters
again in the backward, neither checkpoints activations; this strategy is told the link's rate.

`sent` is what one host sends per step, counted by the interface, TCP and all: torch 2.13's gloo sends the whole tensor
in a reduce-scatter of two ranks, where half of it would do, for all contenders alike. `link` is how long that takes at
the link's rate, the least that a step can take; `rest` is step - link. `CPU` is what one process computes per step, on
all its threads: where it is about `link`, overlap can halve a step, and on a machine that is busy `--batch-size` and
`--seq-len` have to be smaller for that. With `--unlimited` each contender runs on the same two hosts without the limit
too: the difference is what the link costs it. The status is 77 where no such link can be made, with the reason.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_autoparallel.cli.bench.contenders import WITHOUT_ALL, baselines, schedule
from lightning_autoparallel.cli.bench.measurements import OURS, Contender, Job, Runs
from lightning_autoparallel.cli.bench.processes import Host, MeasurementError, ended_by_signals, measure
from lightning_autoparallel.cli.bench.table import first_line, loss_difference, problems, ratio
from lightning_autoparallel.passes import all_passes
from tests.benchmarks.namespaces import NotAllowedError, slow_link
from tests.benchmarks.step_time import show

SKIPPED = 77  # as automake's tests say it
HEADER = ("contender", "step ms", "min..max", "x ours", "launches", "sent MB", "link ms", "rest ms", "CPU ms", "losses")
UNLIMITED = "no limit: "


def config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sections that the ranks read."""
    overrides = {"dim": arguments.dim, "n_layers": arguments.layers, "n_heads": arguments.dim // 64}
    overrides["n_kv_heads"] = overrides["n_heads"] // 2
    return {
        "seed_everything": 42,
        "trainer": {"accelerator": "cpu", "precision": arguments.precision, "max_epochs": -1, "max_steps": 200},
        "model": {
            "class_path": "lightning_autoparallel.models.Llama3Module",
            "init_args": {"size": "debug", "overrides": overrides, "lr": 1e-3, "max_steps": 200},
        },
        "data": {
            "class_path": "lightning_autoparallel.models.TextDataModule",
            "init_args": {"seq_len": arguments.seq_len, "batch_size": arguments.batch_size, "val_fraction": 0.01},
        },
        "strategy": {
            "mesh": {"dp_shard": -1},
            "plan": "fsdp",
            "compile": not arguments.no_compile,
            "process_group_backend": "gloo",
            "hardware": hardware(arguments.mbit, arguments.ranks // 2),
        },
    }


def hardware(mbit: float, ranks_per_node: int) -> dict[str, Any]:
    """The link as `strategy.hardware` takes it: megabits to gigabytes, shared by the ranks of a host.

    Both kinds of links are given, because the Trainer takes the two hosts for one node.
    """
    link = {"bandwidth_gb_per_s": mbit / 8e3 / ranks_per_node, "latency_us": 60.0}
    return {"base": "cpu", "intra_node": link, "inter_node": link}


def contenders(arguments: argparse.Namespace) -> list[Contender]:
    """This strategy, with its passes and without any, and those of Lightning's that were asked for."""
    names = [graph_pass.name for graph_pass in all_passes()]
    return [
        Contender(name=OURS),
        Contender(name=WITHOUT_ALL, overrides={"disabled_passes": names}),
        *(baselines()[name] for name in arguments.against),
    ]


def measure_all(arguments: argparse.Namespace, mbit: float | None, rounds: int) -> list[Runs]:
    """All contenders in turn over one link; what fails is remembered, and the others go on.

    Raises:
        NotAllowedError: no such link can be made here.
    """
    found = {contender.name: Runs(contender=contender) for contender in contenders(arguments)}
    with slow_link(mbit) as alone, tempfile.TemporaryDirectory(prefix="autoparallel-slow-link-") as cache:
        # What is compiled is kept for the next round: the start is not measured.
        kept = {"TORCHINDUCTOR_CACHE_DIR": cache}
        hosts = [replace(host, environment={**host.environment, **kept}) for host in alone]
        for turn, contender in schedule([runs.contender for runs in found.values()], rounds):
            found[contender.name] = _one_more(found[contender.name], arguments, hosts)
            print(
                f"round {turn}: {_outcome(found[contender.name])}, load {os.getloadavg()[0]:.1f}",
                file=sys.stderr,
                flush=True,
            )
    return list(found.values())


def _one_more(runs: Runs, arguments: argparse.Namespace, hosts: Sequence[Host]) -> Runs:
    sections = config(arguments)
    sections["strategy"] |= runs.contender.overrides
    counts = {"processes": arguments.ranks, "warmup": arguments.warm_up, "steps": arguments.steps}
    job = Job(config=sections, contender=runs.contender, **counts)
    try:
        measured = measure(job, threads=1, limit_s=arguments.limit_s, hosts=hosts)
        return replace(runs, measured=[*runs.measured, measured])
    except MeasurementError as error:
        return replace(runs, errors=[*runs.errors, str(error)])


def _outcome(runs: Runs) -> str:
    if runs.errors:
        return f"{runs.contender.name}: failed: {first_line(runs.errors[-1])}"
    return f"{runs.contender.name}: {runs.measured[-1].step_ms:.1f} ms"


def rows(all_runs: Sequence[Runs], mbit: float | None) -> list[list[str]]:
    """Rows below `HEADER`, medians over rounds; ratios are contender / ours, so above 1 ours is faster."""
    return [_row(runs, all_runs[0], mbit) for runs in all_runs]


def _row(runs: Runs, ours: Runs, mbit: float | None) -> list[str]:
    step_ms, sent = runs.median("step_ms"), runs.median("sent_bytes")
    if step_ms is None:
        return [runs.contender.name, *["-"] * (len(HEADER) - 2), "failed"]
    steps, times = runs.values("step_ms"), ratio(runs, ours, "step_ms")
    link_ms = None if sent is None or mbit is None else link_time_ms(sent, mbit)
    return [
        runs.contender.name,
        f"{step_ms:.1f}",
        f"{min(steps):.1f}..{max(steps):.1f}",
        "-" if times is None else f"{times:.2f}",
        f"{runs.median('launches'):.6g}",
        "-" if sent is None else f"{sent / 1e6:.1f}",
        "-" if link_ms is None else f"{link_ms:.1f}",
        "-" if link_ms is None else f"{step_ms - link_ms:.1f}",
        f"{runs.median('cpu_ms'):.1f}",
        f"{loss_difference(runs, ours):.0e}",
    ]


def link_time_ms(sent_bytes: float, mbit: float) -> float:
    """How long one direction of the link takes for so many bytes, at least."""
    return sent_bytes * 8 / (mbit * 1e6) * 1e3


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=400.0, help="of the link, per direction")
    parser.add_argument("--ranks", type=int, default=2, help="processes, half of them on each host")
    parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed", "bf16-true"])
    parser.add_argument("--against", nargs="*", default=["fsdp2"], choices=list(baselines()))
    parser.add_argument("--no-compile", action="store_true", help="interpret this strategy's graphs: no fused kernels")
    parser.add_argument("--unlimited", action="store_true", help="all of them without the limit too, one round")
    for name, default in (("rounds", 3), ("steps", 10), ("warm-up", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("dim", 512), ("layers", 4), ("seq-len", 256), ("batch-size", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds after which a measurement is ended")
    arguments = parser.parse_args(argv)
    if arguments.ranks < 2 or arguments.ranks % 2:
        parser.error(f"--ranks {arguments.ranks} do not divide over two hosts")
    if arguments.dim % 128:
        parser.error(f"--dim {arguments.dim} is no multiple of 128: heads are 64 wide, two to a key")
    if arguments.mbit <= 0:
        parser.error(f"--mbit {arguments.mbit} is no rate")
    return arguments


def report(arguments: argparse.Namespace, limited: Sequence[Runs], unlimited: Sequence[Runs]) -> str:
    """What is printed at the end."""
    title = (
        f"Llama 3, dim {arguments.dim}, {arguments.layers} layers, {arguments.precision}, "
        f"{'interpreted' if arguments.no_compile else 'compiled'}; {arguments.batch_size} "
        f"sequences of {arguments.seq_len} bytes per rank; {arguments.ranks} ranks over gloo and {arguments.mbit:g} "
        f"mbit/s; {arguments.rounds} round(s) of {arguments.steps} steps after {arguments.warm_up}"
    )
    table = [list(HEADER), *rows(limited, arguments.mbit)]
    for row in rows(unlimited, None):
        table.append([UNLIMITED + row[0], *row[1:]])
    return "\n".join([title, show(table), *(f"problem: {line}" for line in problems(limited, limited[0]))])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    arguments = parse(argv)
    try:
        with ended_by_signals():
            limited = measure_all(arguments, arguments.mbit, arguments.rounds)
            unlimited = measure_all(arguments, None, 1) if arguments.unlimited else []
    except NotAllowedError as error:
        print(f"skipped: {error}", file=sys.stderr)
        return SKIPPED
    print(report(arguments, limited, unlimited))
    return int(any(runs.errors for runs in [*limited, *unlimited]))


if __name__ == "__main__":
    sys.exit(main())
