"""How much of its memory a plan may use on a rank."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning_autoparallel.config import EngineConfig
from lightning_autoparallel.contracts import CapturedGraph, PlanReport, ShardingPlan
from lightning_autoparallel.cost import HardwareSpec
from lightning_autoparallel.cost.detect import memory_of, unlisted_gpu
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.passes import EXTRA_BYTES
from lightning_autoparallel.pipeline.agreement import ControlGroup
from lightning_autoparallel.pipeline.fastest_plan import FOR_SPEED
from lightning_autoparallel.pipeline.rank_memory import kept_bytes

if TYPE_CHECKING:
    from lightning_autoparallel.pipeline.found_plan import FoundPlan

_USABLE = 0.9  # of a device's memory
_ROUND_BYTES = 2**28  # equal machines keep a little more or less for themselves, and plans are kept for a budget


def budget_bytes(config: EngineConfig, mesh: ParallelMesh, hardware: HardwareSpec, control: ControlGroup) -> float:
    """``memory_budget_gib``, else nine tenths of the memory of the rank that has least; every rank calls it.

    The memory is the device's, or this rank's share of the host's, and no more than ``hardware`` has, by which `plan`
    goes, unless that is another device's, because the table has no such GPU. In a fake world it is what it has.
    """
    if config.memory_budget_gib is not None:
        return config.memory_budget_gib * 2**30
    of_hardware = _USABLE * hardware.memory_bytes
    if mesh.backend == "fake":
        return of_hardware
    device_mesh = mesh.device_mesh
    sharing = 1 if device_mesh.device_type == "cuda" else min(device_mesh.size(), hardware.ranks_per_node)
    is_listed = config.hardware is not None or device_mesh.device_type != "cuda" or unlisted_gpu() is None
    told = control.gather((memory_of(device_mesh.device_type) // sharing, is_listed))
    least = _USABLE * min(size for size, _ in told)
    usable = max(least // _ROUND_BYTES * _ROUND_BYTES, 1.0)
    return min(usable, of_hardware) if told[0][1] else usable


def room_of_passes(captured: CapturedGraph, plan: ShardingPlan, found: FoundPlan, hardware: HardwareSpec) -> int | None:
    """Bytes that the step of a plan that was found may take beside what is kept, where it is faster by more.

    None for any other graph: what the budget leaves beside an evaluation, or a step that trains other parameters, was
    not reckoned, and of calls of modules several are there at once. Predictions are not exact, and passes may pass what
    they are given twice by what any order may take more: both stays free.
    """
    if captured.local or not captured.has_backward or plan.found is None or math.isinf(found.budget_bytes):
        return None
    usable = (found.budget_bytes - found.missing_bytes) / (1 + (hardware.reserved_share or 0.0))
    return max(int(FOR_SPEED * usable - kept_bytes(captured, plan, found.state)) - 2 * EXTRA_BYTES, 0)


def told_of_budget(
    captured: CapturedGraph, plan: ShardingPlan, report: PlanReport, config: EngineConfig, found: FoundPlan
) -> str | None:
    """What is to be said of a step whose plan was not found within ``memory_budget_gib``, and takes more."""
    was_found = plan.found is not None or found.spec is not None
    if config.memory_budget_gib is None or was_found or captured.local or not captured.has_backward:
        return None
    if report.predicted_peak_bytes is None:
        return None
    taken_gib = (kept_bytes(captured, plan, found.state) + report.predicted_peak_bytes) / 2**30
    if taken_gib <= config.memory_budget_gib:
        return None
    return (
        f"autoparallel: {captured.name} takes {taken_gib:.3g} GiB of a rank (predicted), of memory_budget_gib="
        f"{config.memory_budget_gib:.3g}: plan {config.plan.name!r} is given, and is not changed for a budget, as plan "
        "'auto' is"
    )
