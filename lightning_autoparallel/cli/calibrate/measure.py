"""All samples, taken by all ranks together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from lightning_autoparallel.cli.calibrate.collective_times import (
    collective_samples,
    late_share,
    launch_time_us,
    overlap_samples,
)
from lightning_autoparallel.cli.calibrate.kernel_times import kernel_samples
from lightning_autoparallel.cli.calibrate.samples import CollectiveSample, Samples
from lightning_autoparallel.cli.calibrate.stopwatch import Stopwatch
from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.cost import group_shape
from lightning_autoparallel.mesh import ParallelMesh, build_mesh
from lightning_autoparallel.pipeline.progress import StageProgress, terminal_display

_LONGER, _SHORTER = 2.0, 0.5  # computing beside a collective, in times of that
_OVERLAP_BYTES = {"cpu": 2**22, "cuda": 2**27}


def measure(
    spec: MeshSpec, device_type: str, dtypes: Sequence[torch.dtype], ranks_per_node: int, spent_s: float
) -> Samples:
    """Time kernels on every rank at once, and collectives over each axis of ``spec``, whose ranks these are.

    Kernels take as long as in a step whose ranks wait for the slowest of them at each collective.

    Raises:
        ConfigError: the sizes do not multiply to the world size.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    stopwatch = Stopwatch(device=device, spent_s=spent_s)
    mesh = build_mesh(spec, device_type)
    axes = list(_axes(mesh))
    progress = StageProgress(is_on=lambda: dist.get_rank() == 0, display=terminal_display)
    with progress.stage("calibrate", total=len(axes) + 1) as running:
        running.advance("kernels")
        kernels = kernel_samples(stopwatch, dtypes)
        if not axes:
            return Samples(kernels=kernels)
        late = late_share(stopwatch, axes[-1])
        collectives: list[CollectiveSample] = []
        for axis in axes:
            running.advance(f"collectives over {axis.name}")
            group = group_shape(mesh.sizes, axis.mesh_axes, ranks_per_node)
            share = replace(stopwatch, spent_s=spent_s / len(axes))
            collectives += collective_samples(share, axis, group, late)
        overlap = overlap_samples(stopwatch, axes[-1], _OVERLAP_BYTES[device_type], (_LONGER, _SHORTER), late)
        return Samples(
            kernels=[replace(kernel, time_us=kernel.time_us * (1 + late)) for kernel in kernels],
            collectives=collectives,
            late_share=late,
            launch_us=stopwatch.slowest(launch_time_us(axes[-1], stopwatch.device)),
            longer=overlap[_LONGER],
            shorter=overlap[_SHORTER],
        )


def _axes(mesh: ParallelMesh) -> Iterator[PlanAxis]:
    """Each axis of several ranks, then all of them together."""
    active = mesh.active(mesh.spec.names)
    for names in dict.fromkeys(itertools.chain(((name,) for name in active), [active])):
        if names:
            axis = mesh.plan_axis(names)
            assert axis is not None
            yield axis
