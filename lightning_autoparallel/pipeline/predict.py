"""What the final graphs will cost: times and memory for the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, fx

from lightning_autoparallel.config import EngineConfig
from lightning_autoparallel.contracts import (
    CapturedGraph,
    GraphPrediction,
    PartitionedGraph,
    PlanReport,
    ShardingPlan,
    TimelineEvent,
)
from lightning_autoparallel.cost import CostModel, HardwareSpec, hardware_from, mesh_groups
from lightning_autoparallel.cost.detect import detected_hardware, unlisted_gpu
from lightning_autoparallel.cost.memory import MemoryTimeline, StepMemory, predict_step_memory
from lightning_autoparallel.cost.optimizer import ADAMW, OptimizerState, update_time_us
from lightning_autoparallel.errors import ConfigError, UnsupportedOpError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import local_shape
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.pipeline.agreement import ControlGroup
from lightning_autoparallel.pipeline.fastest_plan import Forecast
from lightning_autoparallel.pipeline.module_times import times_by_module


def cost_model(
    config: EngineConfig, mesh: ParallelMesh, control: ControlGroup, warn: Callable[[str], None]
) -> CostModel:
    """The costs of a mesh on the configured hardware, or on that of its devices; equal on all ranks.

    That is ``cpu`` where processes talk over gloo, and rank 0's GPU elsewhere, ``h100`` without one; ``warn`` is told
    where the table has no such GPU.

    Raises:
        ConfigError: the hardware is not known.
    """
    hardware = hardware_from(config.hardware or hardware_of_devices(mesh.backend, control, warn))
    if config.ranks_per_node is not None:
        hardware = replace(hardware, ranks_per_node=config.ranks_per_node)
    return CostModel(hardware=hardware, groups=mesh_groups(mesh, hardware.ranks_per_node))


def hardware_of_devices(backend: str, control: ControlGroup, warn: Callable[[str], None]) -> str:
    """A name in the table of hardware; all ranks ask together. A fake world stands for one of GPUs as are here."""
    if backend == "gloo":
        return "cpu"
    name, unlisted = control.told_by_first((detected_hardware("cuda").name, unlisted_gpu()))
    if unlisted is not None:
        warn(
            f"autoparallel: {unlisted} is in no table of hardware, and is taken for {name}: plans and passes go by its "
            "rates; `lightning-autoparallel calibrate --output rates.yaml` measures this one's, for "
            "strategy.hardware=rates.yaml"
        )
    return str(name)


def with_predictions(
    report: PlanReport,
    captured: CapturedGraph,
    partitioned: PartitionedGraph,
    costs: CostModel,
    axes_by_group: Mapping[str, str],
) -> PlanReport:
    """The report with predicted times and memory, and what they assume; with a note where a cost is unknown.

    A call whose time is unknown leaves the step's peak of memory known.
    """
    samples, tokens = _global_batch(captured)
    report = replace(report, hardware=costs.hardware.as_json(), samples=samples, tokens=tokens)
    try:
        memory = predict_step_memory(partitioned)
    except UnsupportedOpError as error:
        return replace(report, notes=(*report.notes, f"no predicted times and memory: {error}"))
    report = replace(report, predicted_peak_bytes=memory.peak_bytes)
    try:
        predictions = _predictions(partitioned, memory, costs, axes_by_group)
        around, update = around_us(report, costs.hardware), update_time_us(report.gradients_bytes, costs.hardware)
        return replace(report, predictions=predictions, around_us=around, update_us=update)
    except (UnsupportedOpError, ConfigError) as error:
        return replace(report, notes=(*report.notes, f"no predicted times: {error}"))


def forecast_of(
    captured: CapturedGraph,
    plan: ShardingPlan,
    partitioned: PartitionedGraph,
    costs: CostModel,
    state: OptimizerState = ADAMW,
) -> Forecast:
    """What a step takes whose passes are done, with optimizers that keep this ``state``.

    Raises:
        UnsupportedOpError: the memory of a value is unknown.
    """
    memory = predict_step_memory(partitioned)
    launches = sum(len(list(fxn.collectives_of(half.graph))) for half in partitioned.graphs().values())
    try:
        graphs_us = sum(costs.timeline(graph_module.graph).time_us for graph_module in partitioned.graphs().values())
    except (UnsupportedOpError, ConfigError):
        return Forecast(time_us=None, peak_bytes=memory.peak_bytes, launches=launches, largest=memory.largest)
    time_us = graphs_us + step_update_us(captured, plan, costs, state)
    return Forecast(time_us=time_us, peak_bytes=memory.peak_bytes, launches=launches, largest=memory.largest)


def step_update_us(captured: CapturedGraph, plan: ShardingPlan, costs: CostModel, state: OptimizerState) -> float:
    """Microseconds that optimizers which keep this ``state`` take behind a planned step: a micro-batch's share."""
    trained = stored_bytes(captured, plan, trained_only=True)
    once_us = sum(update_time_us(size, costs.hardware, state.of(name)) for name, size in trained.items())
    return once_us / state.micro_batches


def stored_bytes(captured: CapturedGraph, plan: ShardingPlan, trained_only: bool = False) -> dict[str, float]:
    """Bytes of each parameter that lie on a rank between steps, by name: on that which has most."""
    trained = {item.name for item in captured.outputs if item.is_parameter_gradient}
    nodes = captured.graph_module.graph.find_nodes(op="placeholder")
    found = {}
    for node, item in zip(nodes, captured.inputs, strict=True):
        if item.kind == "parameter" and (item.name in trained or not trained_only):
            value = node.meta["val"]
            local = local_shape(value.shape, plan.parameters[item.name], plan.axes)
            found[item.name] = float(math.prod(local) * value.element_size())
    return found


def around_us(report: PlanReport, hardware: HardwareSpec) -> float | None:
    """Microseconds of a training step beside its graphs: the host's, and an optimizer's that moves what AdamW does.

    None where the hardware's share of the host was not measured, or nothing is trained.
    """
    host_us = hardware.host_time_us(len(report.parameters))
    if host_us is None or not report.gradients_bytes:
        return None
    return host_us + update_time_us(report.gradients_bytes, hardware)


def _predictions(
    partitioned: PartitionedGraph, memory: StepMemory, costs: CostModel, axes_by_group: Mapping[str, str]
) -> dict[str, GraphPrediction]:
    """Times and memory of each graph of a step, by its name in reports.

    Raises:
        UnsupportedOpError: an operator or a process group of which nothing is known.
        ConfigError: the hardware has no peak for the dtype of a matrix product.
    """
    halves = [half for half in (memory.forward, memory.backward) if half is not None]
    return {
        name: _predict(graph_module.graph, half, costs, axes_by_group)
        for (name, graph_module), half in zip(partitioned.graphs().items(), halves, strict=True)
    }


def _predict(
    graph: fx.Graph, memory: MemoryTimeline, costs: CostModel, axes_by_group: Mapping[str, str]
) -> GraphPrediction:
    timeline = costs.timeline(graph)
    return GraphPrediction(
        time_us=timeline.time_us,
        compute_us=timeline.compute_us,
        communication_us=timeline.communication_us,
        exposed_us=timeline.exposed_us,
        peak_memory_bytes=memory.peak_bytes,
        at_peak=memory.contributors,
        live_bytes=memory.live_bytes,
        events=tuple(_on_axes(event, axes_by_group) for event in timeline.events),
        by_module=times_by_module(graph, timeline),
    )


def _on_axes(event: TimelineEvent, axes_by_group: Mapping[str, str]) -> TimelineEvent:
    return replace(event, stream=axes_by_group.get(event.stream, event.stream))


def global_rows(captured: CapturedGraph) -> int | None:
    """Rows of the global batch of a step; None where no dim of the batch is known to be rows."""
    return _global_batch(captured)[0]


def _global_batch(captured: CapturedGraph) -> tuple[int | None, int | None]:
    """Rows of the global batch, and its tokens: the elements of the largest matrix of indices in it.

    Integers of other types or shapes are pixels, labels, masks: no sequences of tokens.
    """
    placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
    pairs = zip(captured.inputs, placeholders, strict=True)
    batched: list[Tensor] = [node.meta["val"] for item, node in pairs if item.kind == "batch" and item.batched]
    if not batched:
        return None, None
    sequences = [t for t in batched if t.dim() == 2 and t.dtype in (torch.int32, torch.int64)]
    tokens = max((t.numel() for t in sequences), default=None)
    return int(batched[0].shape[0]), tokens
