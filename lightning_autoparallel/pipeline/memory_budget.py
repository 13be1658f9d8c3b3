"""How much of its memory a plan may use on a rank."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_autoparallel.config import AUTO, EngineConfig
from lightning_autoparallel.contracts import CapturedGraph, PlanReport, ShardingPlan
from lightning_autoparallel.cost import HardwareSpec
from lightning_autoparallel.cost.detect import memory_of, unlisted_gpu
from lightning_autoparallel.cost.optimizer import OptimizerState
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
    usable = hardware.usable_bytes(found.budget_bytes - found.missing_bytes)
    return max(int(FOR_SPEED * usable - kept_bytes(captured, plan, found.state)) - 2 * EXTRA_BYTES, 0)


def told_of_budget(
    captured: CapturedGraph,
    plan: ShardingPlan,
    report: PlanReport,
    config: EngineConfig,
    found: FoundPlan,
    hardware: HardwareSpec,
) -> str | None:
    """What is to be said of a step that takes more than a rank may use, by a plan that was not found for it.

    Either its plan was given, or the step came after one was found.
    """
    if captured.local or not captured.has_backward or plan.found is not None or report.predicted_peak_bytes is None:
        return None
    state, budget_bytes = found.state, (config.memory_budget_gib or math.inf) * 2**30
    why = f"plan {config.plan.name!r} is given, and is not changed for memory_budget_gib, as plan 'auto' is"
    if config.plan.base == AUTO and config.plan.file is None:
        why = "plan 'auto' was not found"
    if found.spec is not None:
        state, budget_bytes = _of_more(found.state, captured), found.budget_bytes
        why = (
            "other parameters are trained than when plan 'auto' was found, or batches are larger. A plan is found once "
            "in a training; one that begins so is planned for it"
        )
    taken_bytes = hardware.reserved_bytes(kept_bytes(captured, plan, state) + report.predicted_peak_bytes)
    if taken_bytes <= budget_bytes:
        return None
    return (
        f"autoparallel: {captured.name} takes (predicted) {taken_bytes / 2**30:.3g} GiB of a rank as it is now, of "
        f"{budget_bytes / 2**30:.3g} that it may use: {why}"
    )


def _of_more(state: OptimizerState, captured: CapturedGraph) -> OptimizerState:
    """With what optimizers will keep of parameters that were frozen when they were asked: as much as of any other."""
    if state.per_byte is None:
        return state
    most = max(state.per_byte.values(), default=0.0)
    trained = [item.name for item in captured.outputs if item.is_parameter_gradient]
    return replace(state, per_byte={**state.per_byte, **{name: state.of(name) or most for name in trained}})
