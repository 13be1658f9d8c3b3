"""``lightning-autoparallel bench``: the measurements in turn, and what is printed of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_autoparallel.artifacts import ArtifactWriter, to_json
from lightning_autoparallel.callbacks.tables import print_table
from lightning_autoparallel.cli.bench.bench_options import BenchOptions, bench_options, cores, plain_config
from lightning_autoparallel.cli.bench.contenders import schedule
from lightning_autoparallel.cli.bench.measurements import OURS, Contender, Job, Runs
from lightning_autoparallel.cli.bench.processes import MeasurementError, ended_by_signals, measure
from lightning_autoparallel.cli.bench.same_graphs import same_graph_lines
from lightning_autoparallel.cli.bench.table import NOTES, as_json, comparison, first_line, predicted_lines, problems
from lightning_autoparallel.errors import AutoParallelError, ConfigError
from lightning_autoparallel.lightning_compat import LIGHTNING_VERSION
from lightning_autoparallel.lightning_compat.cli import LightningArgumentParser

BENCH = "bench"


def run_bench(parser: LightningArgumentParser, config: Any) -> None:
    """Measure this strategy beside Lightning's DDP and FSDP2, or without its passes, on this machine.

    Args:
        parser: of the subcommand.
        config: what it parsed.

    Raises:
        AutoParallelError: this strategy failed in a round; the others' figures are printed all the same.
        SystemExit: an argument is wrong, with status 2.
    """
    plain = json.loads(parser.dump(config, skip_none=False, format="json"))
    try:
        options = bench_options(plain)
    except ConfigError as error:
        parser.error(str(error))
    with ended_by_signals():
        all_runs = measure_all(plain_config(plain), options)
    policy = plain["strategy"].get("activation_checkpointing", "none")
    show(all_runs, options, recomputing_lines(policy, options.contenders))
    failed = all_runs[0].errors
    if failed:
        raise AutoParallelError(f"this strategy failed in {len(failed)} of {options.rounds} round(s): {failed[0]}")


def measure_all(config: Mapping[str, Any], options: BenchOptions) -> list[Runs]:
    """Every contender in every round, each in fresh processes; what fails is remembered and the others go on."""
    runs = {contender.name: Runs(contender=contender) for contender in options.contenders}
    for turn, contender in schedule(options.contenders, options.rounds):
        strategy = {**config["strategy"], **contender.overrides}
        job = Job(
            config={**config, "strategy": strategy},
            contender=contender,
            processes=options.processes,
            warmup=options.warmup,
            steps=options.steps,
        )
        so_far = runs[contender.name]
        try:
            measured = measure(job, threads=options.threads, limit_s=options.limit_s)
            runs[contender.name] = replace(so_far, measured=[*so_far.measured, measured])
            _progress(turn, options, contender, f"{measured.step_ms:.1f} ms")
        except MeasurementError as error:
            runs[contender.name] = replace(so_far, errors=[*so_far.errors, str(error)])
            _progress(turn, options, contender, f"failed: {first_line(str(error))}")
    return list(runs.values())


def _progress(turn: int, options: BenchOptions, contender: Contender, result: str) -> None:
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(f"round {turn}/{options.rounds}: {contender.name}: {result}{load}", file=sys.stderr, flush=True)


def recomputing_lines(policy: Any, contenders: Sequence[Contender]) -> list[str]:
    """A line where this strategy computes more than Lightning's, which keep all that the backward needs."""
    if policy in ("none", "auto") or all(contender.kind == OURS for contender in contenders):
        return []
    return [
        f"this strategy computes activations again in the backward (activation_checkpointing: {policy}), Lightning's",
        "keep them: with --strategy.activation_checkpointing none all compute the same",
    ]


def show(all_runs: Sequence[Runs], options: BenchOptions, said: Sequence[str] = ()) -> None:
    """Print the table, whose first row is this strategy, and write the figures where asked."""
    facts, found = machine(options, all_runs), problems(all_runs, all_runs[0])
    print(*title(facts), "", sep="\n", flush=True)
    print_table(comparison(all_runs, all_runs[0]))
    print(
        "",
        *predicted_lines(all_runs),
        *same_graph_lines(all_runs),
        *said,
        *NOTES,
        *(f"problem: {line}" for line in found),
        sep="\n",
        flush=True,
    )
    if options.output is not None:
        figures = {"measured_on": facts, "contenders": as_json(all_runs, all_runs[0]), "problems": found}
        ArtifactWriter(Path(options.output).parent).text(Path(options.output).name, to_json(figures))


def machine(options: BenchOptions, all_runs: Sequence[Runs]) -> dict[str, Any]:
    """Where and how it was measured."""
    seen = [run for runs in all_runs for run in runs.measured]
    return {
        "cores": cores(),
        "processes": options.processes,
        "threads_per_process": options.threads,
        "devices": sorted({run.device for run in seen}),
        "backends": sorted({run.backend for run in seen}),
        "memory": sorted({run.memory_label for run in seen}),
        "torch": torch.__version__,
        "lightning": LIGHTNING_VERSION,
        "rounds": options.rounds,
        "steps": options.steps,
        "warmup": options.warmup,
    }


def title(facts: Mapping[str, Any]) -> list[str]:
    """The facts of `machine`, in lines."""
    seen = {name: " and ".join(facts[name]) or "nothing" for name in ("devices", "backends", "memory")}
    return [
        f"Measured on {facts['processes']} process(es) of {facts['threads_per_process']} thread(s), {facts['cores']} "
        f"cores: {seen['devices']} over {seen['backends']}",
        f"torch {facts['torch']}, lightning {facts['lightning']}; {facts['rounds']} round(s) of {facts['steps']} "
        f"batches after {facts['warmup']}",
        f"memory: {seen['memory']}",
    ]
