"""The arguments of ``bench``, checked, and the config that its processes read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_autoparallel.cli.bench.contenders import ours, parse_against, with_plans, without_passes
from lightning_autoparallel.cli.bench.measurements import Contender
from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.lightning_compat.cli import LightningArgumentParser
from lightning_autoparallel.passes import all_passes

_SECTIONS = ("seed_everything", "trainer", "model", "data", "strategy")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """How much is measured: rounds of all contenders, batches of each, on how many processes and threads."""

    contenders: Sequence[Contender]
    processes: int
    threads: int
    steps: int = 30
    warmup: int = 5
    rounds: int = 3
    limit_s: float = 1800.0
    output: str | None = None

    def __post_init__(self) -> None:
        for name in ("processes", "threads", "steps", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: give at least 1")
        if self.warmup < 1:
            raise ConfigError(f"--warmup {self.warmup}: give at least 1, for the first step compiles")
        if self.output is not None and Path(self.output).is_dir():
            raise ConfigError(f"--output {self.output} is a folder: name the file to write the figures to")


def add_bench_arguments(parser: LightningArgumentParser) -> None:
    """Add the arguments of ``bench``."""
    parser.add_argument("--against", type=str, default="", help="ddp, fsdp2, ddp-compiled, fsdp2-compiled, by commas.")
    parser.add_argument("--passes", action="store_true", help="Also measure with each pass off, and with all off.")
    parser.add_argument(
        "--plans", type=str, default="", help="Also measure with plans auto, ddp, fsdp, hsdp, by commas."
    )
    parser.add_argument("--processes", type=int | None, default=None, help="Processes; trainer.devices unless given.")
    parser.add_argument("--steps", type=int, default=30, help="Batches that are timed in each measurement.")
    parser.add_argument("--warmup", type=int, default=5, help="Batches before them that are not.")
    parser.add_argument("--rounds", type=int, default=3, help="Measurements of each contender.")
    parser.add_argument("--threads", type=int | None, default=None, help="Threads of each process; cores/processes.")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="Seconds after which a measurement is ended.")
    parser.add_argument("--output", type=str | None, default=None, help="Write all figures to this JSON file.")


def bench_options(config: Mapping[str, Any]) -> BenchOptions:
    """The options of a parsed config, given as plain values.

    Raises:
        ConfigError: one of them is wrong, or the processes do not fill the mesh.
    """
    contenders = [ours(), *with_plans(config["plans"]), *parse_against(config["against"])]
    if config["passes"]:
        disabled = config["strategy"]["disabled_passes"] or []
        contenders += without_passes([graph_pass.name for graph_pass in all_passes()], disabled)
    if len(contenders) == 1:
        raise ConfigError("bench compares: give --against ddp,fsdp2, --plans auto,ddp or --passes")
    processes = _processes(config)
    options = BenchOptions(
        contenders=contenders,
        processes=processes,
        threads=config["threads"] or max(1, cores() // max(1, processes)),
        **{name: config[name] for name in ("steps", "warmup", "rounds", "limit_s", "output")},
    )
    MeshSpec.from_mapping(config["strategy"]["mesh"] or {"dp_shard": -1}).resolve(processes)
    return options


def _processes(config: Mapping[str, Any]) -> int:
    if config["processes"] is not None:
        return int(config["processes"])
    devices = config["trainer"]["devices"]
    if isinstance(devices, (list, tuple)):
        return len(devices)
    if str(devices).isdigit():
        return int(devices)
    raise ConfigError(f"trainer.devices is {devices!r}: give --processes N, the number of processes to measure on")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that the ranks read, without what would keep or show something; every contender has one seed."""
    sections = {name: config[name] for name in _SECTIONS if config.get(name) is not None}
    seed = sections.get("seed_everything")
    sections["seed_everything"] = 0 if seed is None or isinstance(seed, bool) else seed
    sections["trainer"] = {**sections["trainer"], "logger": False, "callbacks": None, "profiler": None}
    sections["trainer"].pop("strategy", None)
    return sections
