"""Named plans: ``ddp`` and ``fsdp``, as plan axes, pins and parameter storage."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from lightning_autoparallel.contracts import (
    CapturedGraph,
    GraphInput,
    NodePlacement,
    Placements,
    PlanAxis,
    ShardingPlan,
)
from lightning_autoparallel.cost.collective import redistribution_time_us
from lightning_autoparallel.cost.hardware import GENERIC, HardwareSpec
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.plan.candidates import Candidate, CandidateTable
from lightning_autoparallel.plan.solve import AxisProblem, producer_of, solve_axis


def plan_axes(plan: str, mesh: ParallelMesh) -> tuple[PlanAxis, ...]:
    """The plan's axes on this mesh: all ``dp_*`` together, or none for a single process.

    Raises:
        ConfigError: an axis of more than one process that the plan would leave idle.
    """
    idle = [name for name in mesh.active(mesh.spec.names) if name not in mesh.data_parallel_axes]
    if idle:
        raise ConfigError(
            f"plan '{plan}' leaves mesh axis '{idle[0]}' of size {mesh.sizes[idle[0]]} idle: it would compute "
            f"everything {mesh.sizes[idle[0]]} times; set {idle[0]}: 1"
        )
    axis = mesh.plan_axis(mesh.data_parallel_axes)
    return (axis,) if axis else ()


def parameter_storage(plan: str, shape: tuple[int, ...], axes: tuple[PlanAxis, ...]) -> Placements:
    """How a parameter lies between steps: ``fsdp`` shards dim 0 over each axis, scalars and ``ddp`` keep it whole."""
    placement: Placement = Shard(0) if plan == "fsdp" and shape else Replicate()
    return tuple(placement for _ in axes)


def make_plan(
    captured: CapturedGraph,
    plan: str,
    mesh: ParallelMesh,
    warn: Callable[[str], None],
    hardware: HardwareSpec = GENERIC,
) -> ShardingPlan:
    """A placement for every node of ``captured``.

    Raises:
        ConfigError: the plan leaves an axis idle.
    """
    axes = plan_axes(plan, mesh)
    placeholders = [node for node in captured.graph_module.graph.nodes if node.op == "placeholder"]
    storage = {
        item.name: parameter_storage(plan, tuple(node.meta["val"].shape), axes)
        for node, item in zip(placeholders, captured.inputs, strict=True)
        if item.kind == "parameter"
    }
    solved = [_solve(captured, placeholders, axis, mesh, hardware, warn) for axis in axes]
    return ShardingPlan(
        name=plan,
        axes=axes,
        nodes=_combine(captured.graph_module.graph, solved),
        parameters=storage,
        outputs=_output_placements(captured, storage, solved, axes),
    )


def _solve(
    captured: CapturedGraph,
    placeholders: list[fx.Node],
    axis: PlanAxis,
    mesh: ParallelMesh,
    hardware: HardwareSpec,
    warn: Callable[[str], None],
) -> dict[fx.Node, Candidate]:
    times: dict[tuple[Placement, Placement, int], float] = {}

    def edge_time_us(source: Placement, target: Placement, size_bytes: int) -> float:
        key = (source, target, size_bytes)
        if key not in times:
            times[key] = redistribution_time_us(source, target, size_bytes, axis.size, hardware)
        return times[key]

    graph = captured.graph_module.graph
    problem = AxisProblem(
        graph=graph,
        table=CandidateTable(axis.size, mesh.submesh(axis.mesh_axes), hardware, warn),
        pins={node: _pin(item, captured) for node, item in zip(placeholders, captured.inputs, strict=True)},
        sinks=[(node, _allowed(captured, index, axis)) for index, node in enumerate(output_nodes(graph))],
        edge_time_us=edge_time_us,
        whole=frozenset(
            node for node, item in zip(placeholders, captured.inputs, strict=True) if item.kind == "parameter"
        ),
    )
    return solve_axis(problem)


def output_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The values a normalised graph returns, in order."""
    (output,) = [node for node in graph.nodes if node.op == "output"]
    return list(output.args[0])  # type: ignore[arg-type]


def _pin(item: GraphInput, captured: CapturedGraph) -> Placement:
    if item.kind == "batch" and item.batched:
        return Shard(0)
    if item.kind == "tangent":
        # The gradient of a result has the result's placement.
        result = _result_value(captured, item.name)
        return Shard(0) if _carries_batch(captured, result) else Replicate()
    return Replicate()


def _result_value(captured: CapturedGraph, name: str) -> Tensor:
    for node, item in zip(output_nodes(captured.graph_module.graph), captured.outputs, strict=True):
        if item.kind == "output" and item.name == name:
            return node.meta["val"]
    raise AssertionError(f"no result {name}")


def global_batch_size(captured: CapturedGraph) -> int | None:
    """Dim 0 of the batched leaves, or None where nothing is batched."""
    placeholders = [node for node in captured.graph_module.graph.nodes if node.op == "placeholder"]
    for node, item in zip(placeholders, captured.inputs, strict=True):
        if item.batched:
            return int(node.meta["val"].shape[0])
    return None


def _carries_batch(captured: CapturedGraph, value: Tensor) -> bool:
    return value.dim() > 0 and value.shape[0] == global_batch_size(captured)


def _allowed(captured: CapturedGraph, index: int, axis: PlanAxis) -> tuple[Placement, ...]:
    """Where output ``index`` may end: results keep their rows on the rank that owns them, everything else is whole."""
    item, node = captured.outputs[index], output_nodes(captured.graph_module.graph)[index]
    if item.kind in ("output", "log") and _carries_batch(captured, node.meta["val"]):
        return (Shard(0),)
    if item.kind == "gradient":
        return (Replicate(), Shard(0))
    return (Replicate(),)


def _output_placements(
    captured: CapturedGraph,
    storage: dict[str, Placements],
    solved: list[dict[fx.Node, Candidate]],
    axes: tuple[PlanAxis, ...],
) -> tuple[Placements | None, ...]:
    placements = []
    for index, item in enumerate(captured.outputs):
        if item.kind == "gradient":
            placements.append(storage[item.name])
        else:
            placements.append(tuple(_allowed(captured, index, axis)[0] for axis in axes))
    return tuple(placements)


def _combine(graph: fx.Graph, solved: list[dict[fx.Node, Candidate]]) -> dict[str, NodePlacement]:
    """Node placements over all axes from the choices per axis."""
    nodes = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        call, index = producer_of(node)
        per_axis = [choices[call] for choices in solved]
        count = len(fxn.values(call))
        if fxn.is_getitem(node):
            outputs: tuple[Placements | None, ...] = (_join([c.outputs[index] for c in per_axis]),)
            inputs: tuple[Placements, ...] = ()
        else:
            arguments = len(fxn.tensor_arguments(node))
            inputs = tuple(tuple(c.inputs[i] for c in per_axis) for i in range(arguments))
            outputs = tuple(_join([c.outputs[i] for c in per_axis]) for i in range(count))
        nodes[node.name] = NodePlacement(inputs=inputs, outputs=outputs)
    return nodes


def _join(placements: list[Placement | None]) -> Placements | None:
    known = tuple(placement for placement in placements if placement is not None)
    return known if len(known) == len(placements) else None
