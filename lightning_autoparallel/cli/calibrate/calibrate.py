"""`lightning-autoparallel calibrate`: the rates of this machine, for `hardware:` in recipes, `plan` and `bench`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from lightning_autoparallel.artifacts import ArtifactWriter
from lightning_autoparallel.callbacks.tables import make_table, print_table
from lightning_autoparallel.cli.bench.bench_options import cores
from lightning_autoparallel.cli.calibrate.measure import measure
from lightning_autoparallel.cli.calibrate.ranks import local_ranks, running_ranks, world_size
from lightning_autoparallel.cli.calibrate.rates import rates_of, residuals, spread, with_steps
from lightning_autoparallel.cli.calibrate.samples import Samples
from lightning_autoparallel.cli.calibrate.step_times import step_samples
from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.cost import hardware_from
from lightning_autoparallel.cost.detect import detected_hardware, memory_of
from lightning_autoparallel.cost.hardware import MEASURABLE
from lightning_autoparallel.errors import ConfigError

CALIBRATE = "calibrate"
CALIBRATE_HELP = "Measure this machine's rates, which predictions take with `--strategy.hardware FILE`."
_PROGRAM = "lightning_autoparallel.cli.main"
_MESH_HINT = 'give axes and sizes, as in {"dp_shard": 2}'
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in MEASURABLE}


@dataclass(frozen=True, kw_only=True)
class _Options:
    mesh: MeshSpec
    dtypes: Sequence[torch.dtype]
    device: str
    processes: int
    threads: int
    spent_s: float
    output: str | None


def run_calibrate(args: Sequence[str]) -> None:
    """Parse what follows the command's name, and measure on the ranks of a launcher, or on processes started here.

    Raises:
        ConfigError: the ranks do not fill the mesh, or a dtype is not known.
        AutoParallelError: a rank failed.
        SystemExit: a mistake in the arguments.
    """
    options = _parsed(args)
    torch.set_num_threads(options.threads)
    command = ["-m", _PROGRAM, CALIBRATE, *args]
    with running_ranks(command, options.device, options.processes, options.threads):
        local = local_ranks(options.processes)
        samples = measure(options.mesh, options.device, options.dtypes, local, options.spent_s)
        rates = _agreed(_rates(samples, options.device, local))
        samples = replace(samples, steps=list(step_samples(options.device, local, rates)))
        if dist.get_rank() == 0:
            _report(samples, with_steps(rates, samples.steps), options.output)


def _rates(samples: Samples, device_type: str, local: int) -> dict[str, Any]:
    base = detected_hardware(device_type).name
    name = f"{base} measured on {dist.get_world_size()} ranks"
    sharing = local if device_type == "cpu" else 1  # a host's memory is that of all its ranks
    memory_bytes = memory_of(device_type) // sharing
    return rates_of(samples, base=base, name=name, memory_bytes=memory_bytes, ranks_per_node=local)


def _agreed(rates: dict[str, Any]) -> dict[str, Any]:
    """Those of rank 0, on all ranks."""
    given = [rates]
    dist.broadcast_object_list(given)
    return given[0]


def _parsed(args: Sequence[str]) -> _Options:
    parser = argparse.ArgumentParser(prog=f"lightning-autoparallel {CALIBRATE}", description=CALIBRATE_HELP)
    parser.add_argument("--output", metavar="FILE", help="write the rates to this YAML file")
    parser.add_argument("--mesh", default='{"dp_shard": -1}', help="each of its axes is measured by itself")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of matrix products, by commas")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is any")
    parser.add_argument("--processes", type=int, help="ranks to start here, without a launcher; GPUs, or 2 on CPUs")
    parser.add_argument("--threads", type=int, help="of each rank; cores/processes")
    parser.add_argument("--spent-s", type=float, default=0.25, help="seconds that are spent on each figure")
    given = parser.parse_args(args)
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    processes = given.processes or (torch.cuda.device_count() if device == "cuda" else 2)
    if given.output is not None and Path(given.output).is_dir():
        parser.error(f"--output {given.output} is a folder: name the file to write the rates to")
    return _Options(
        mesh=MeshSpec.from_mapping(_mesh(given.mesh)).resolve(world_size(processes)),
        dtypes=[_dtype(name.strip()) for name in given.dtypes.split(",")],
        device=device,
        processes=processes,
        threads=given.threads or max(1, cores() // local_ranks(processes)),
        spent_s=given.spent_s,
        output=given.output,
    )


def _mesh(text: str) -> dict[str, int]:
    try:
        mesh = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--mesh {text} is no JSON ({error}): {_MESH_HINT}") from None
    if not isinstance(mesh, dict):
        raise ConfigError(f"--mesh {text} names no axes: {_MESH_HINT}")
    return mesh


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ConfigError(f"--dtypes names {name!r}: known are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _report(samples: Samples, rates: dict[str, Any], output: str | None) -> None:
    rows = list(residuals(samples, hardware_from(rates)))
    table = make_table("Measured, and what is predicted with the rates", ("what", "size"), ("us", "predicted", "ratio"))
    for what, size, measured_us, predicted_us in rows:
        table.add_row(what, size, f"{measured_us:.1f}", f"{predicted_us:.1f}", f"{measured_us / predicted_us:.2f}")
    print_table(table)
    typical, worst = spread([(measured_us, predicted_us) for *_, measured_us, predicted_us in rows])
    print(f"{len(rows)} samples differ from what is predicted {typical:.2f} times in the median, {worst:.2f} at most")
    if samples.late_share:
        print(f"kernels' times hold {samples.late_share:.1%} that ranks wait for the slowest of them")
    text = yaml.safe_dump(rates, sort_keys=False)
    if output is None:
        print(text)
    else:
        ArtifactWriter(Path(output).parent).text(Path(output).name, text)
        print(f"{output}: use it with --strategy.hardware {output}")
