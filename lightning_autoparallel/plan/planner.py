"""Plans: named, written as rules, or found, as plan axes, pins, parameter placements and a placement per node."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import fx
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from lightning_autoparallel.config import AUTO, PlanRule, PlanSpec
from lightning_autoparallel.contracts import (
    CapturedGraph,
    GraphInput,
    GraphOutput,
    NodePlacement,
    Placements,
    PlanAxis,
    ShardingPlan,
)
from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.cost.optimizer import ADAMW, OptimizerState
from lightning_autoparallel.cost.placement import GENERIC, redistribution_time_us
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.plan.activations import Activations
from lightning_autoparallel.plan.automatic import FoundAxis, find_axis, found_spec
from lightning_autoparallel.plan.axis import AxisToPlan, producer_of
from lightning_autoparallel.plan.candidates import Candidate, CandidateTable
from lightning_autoparallel.plan.explain import SearchedAxis, explain_found
from lightning_autoparallel.plan.gradients import late_reductions
from lightning_autoparallel.plan.local import local_spec, own_values
from lightning_autoparallel.plan.local_search import search_axis
from lightning_autoparallel.plan.other_axes import OtherAxes
from lightning_autoparallel.plan.parameter_alternatives import allowed_ways, free_parameters
from lightning_autoparallel.plan.parameter_storage import ParameterPlacement, place_parameters
from lightning_autoparallel.plan.pinned_edges import edge_pins

Warn = Callable[[str], None]
Choices = Mapping[fx.Node, Candidate]
_NONE = Activations()


def plan_axes(plan: str | PlanSpec, mesh: ParallelMesh) -> tuple[PlanAxis, ...]:
    """The plan's axes on this mesh, outermost first; none for a single process.

    All ``dp_*`` axes are one but for plans that treat ``dp_replicate`` and ``dp_shard`` apart: ``hsdp``, ``auto``, and
    rules that name them. An axis that rules name, or that ``auto`` finds placements on, is one of its own.

    Raises:
        ConfigError: an axis of more than one process that the plan would leave idle.
    """
    spec = PlanSpec.parse(plan)
    data_parallel = mesh.active(mesh.data_parallel_axes)
    apart = spec.base in ("hsdp", AUTO) or spec.axes().intersection(data_parallel)
    groups = [(name,) for name in data_parallel] if apart else [data_parallel]
    for name in mesh.active(mesh.spec.names):
        if name in data_parallel:
            continue
        if name not in spec.axes() and spec.base != AUTO:
            raise ConfigError(
                f"plan '{spec.name}' leaves mesh axis '{name}' of size {mesh.sizes[name]} idle: it would compute "
                f"everything {mesh.sizes[name]} times; give rules that name {name}, or set {name}: 1"
            )
        groups.append((name,))
    groups.sort(key=lambda names: mesh.spec.names.index(names[0]) if names else -1)
    return tuple(axis for axis in map(mesh.plan_axis, groups) if axis is not None)


def joint_axes(axes: Sequence[PlanAxis], mesh: ParallelMesh) -> tuple[PlanAxis, ...]:
    """Every two or more plan axes as one, where the mesh has a group in their order."""
    found = []
    for count in range(2, len(axes) + 1):
        for chosen in itertools.combinations(axes, count):
            names = tuple(name for axis in chosen for name in axis.mesh_axes)
            if names == tuple(sorted(names, key=mesh.spec.names.index)):
                joint = mesh.plan_axis(names)
                assert joint is not None
                found.append(joint)
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class _Planning:
    """What every axis is planned from."""

    captured: CapturedGraph
    placeholders: dict[fx.Node, GraphInput]
    parameters: Mapping[str, ParameterPlacement]
    spec: PlanSpec
    axes: tuple[PlanAxis, ...]
    mesh: ParallelMesh
    warn: Warn
    costs: CostModel | None
    room_bytes: float
    with_others: bool
    activations: Activations
    state: OptimizerState
    gathered_again: bool
    may_miss: bool

    @property
    def rules(self) -> tuple[PlanRule, ...]:
        """Those on top of the base plan."""
        return self.spec.rules


def make_plan(
    captured: CapturedGraph,
    plan: str | PlanSpec,
    mesh: ParallelMesh,
    warn: Warn,
    costs: CostModel | None = None,
    room_bytes: float = math.inf,
    computes_whole: bool = False,
    explains: bool = False,
    may_miss: bool = False,
) -> ShardingPlan:
    """A placement for every node of ``captured``: what ``make_plans``, where arguments are told, has first.

    Raises:
        ConfigError: the plan leaves an axis idle, or a rule does not fit the model.
        InfeasiblePlanError: something computes with a parameter that its rule cuts, but has no way to do it.
    """
    return make_plans(
        captured, plan, mesh, warn, costs, room_bytes, computes_whole, explains, with_others=False, may_miss=may_miss
    )[0]


def make_plans(
    captured: CapturedGraph,
    plan: str | PlanSpec,
    mesh: ParallelMesh,
    warn: Warn,
    costs: CostModel | None = None,
    room_bytes: float = math.inf,
    computes_whole: bool = False,
    explains: bool = False,
    with_others: bool = True,
    activations: Activations = _NONE,
    state: OptimizerState = ADAMW,
    gathered_again: bool = True,
    may_miss: bool = False,
) -> tuple[ShardingPlan, ...]:
    """A placement for every node of ``captured``; ``costs`` are what ``auto`` finds it by.

    What it finds is followed by others, unlike it and nearly as good, if it is to be; any other plan is one.

    Of what it finds, parameters with their gradients and the ``state`` of their optimizers, the ``activations`` that
    the backward reads, and what is gathered for a block at a time, have ``room_bytes`` on a rank. Parameters are
    ``gathered_again`` for the backward, or stay gathered until then. A plan that ``computes_whole`` gathers every
    parameter that it uses, whatever rules say of how to compute with it. Rules ``may_miss``, or each has to match a
    parameter and to fit the values that it pins; parameters of a local program may always be missed, as may values
    where there is no backward. What was found ``explains`` itself if that is asked for, which keeps all that there was
    to choose from.

    Raises:
        ConfigError: the plan leaves an axis idle, or a rule does not fit the model.
        InfeasiblePlanError: something computes with a parameter that its rule cuts, but has no way to do it.
    """
    spec, axes = PlanSpec.parse(plan), plan_axes(plan, mesh)
    assert spec.base != AUTO or costs is not None, "auto is found by costs"
    assert not (computes_whole and spec.base == AUTO)
    placeholders = dict(zip(captured.graph_module.graph.find_nodes(op="placeholder"), captured.inputs, strict=True))
    shapes = {i.name: tuple(n.meta["val"].shape) for n, i in placeholders.items() if i.kind == "parameter"}
    placed = place_parameters(local_spec(spec, shapes) if captured.local or may_miss else spec, shapes, axes)
    if computes_whole:
        placed = {name: replace(one, compute=(Replicate(),) * len(axes)) for name, one in placed.items()}
    planning = _Planning(
        captured=captured,
        placeholders=placeholders,
        parameters=placed,
        spec=spec,
        axes=axes,
        mesh=mesh,
        warn=warn,
        costs=costs if spec.base == AUTO else None,
        room_bytes=room_bytes,
        with_others=with_others,
        activations=activations,
        state=state,
        gathered_again=gathered_again,
        may_miss=may_miss,
    )
    return tuple(_plan(planning, shapes, choices, found, explains) for choices, found in _solve_axes(planning))


def _plan(
    planning: _Planning,
    shapes: Mapping[str, tuple[int, ...]],
    choices: Sequence[Choices],
    found: _Found | None,
    explains: bool,
) -> ShardingPlan:
    if found is not None:
        rules = local_spec(found.rules, shapes) if planning.captured.local else found.rules
        planning = replace(planning, parameters=place_parameters(rules, shapes, planning.axes, planning.warn))
        for name, lying in found.axis.parameters.items():
            computed = {lying.computed, Replicate()}
            assert set(planning.parameters[name].compute) <= computed, f"rules that were found misplace {name}"
    return ShardingPlan(
        name=planning.spec.name,
        axes=planning.axes,
        nodes=_combine(planning.captured.graph_module.graph, choices),
        parameters={name: placement.storage for name, placement in planning.parameters.items()},
        outputs=_output_placements(planning),
        joint_axes=joint_axes(planning.axes, planning.mesh),
        found=None if found is None else found.rules,
        notes=() if found is None else (found.axis.note,),
        solved=None if found is None else found.axis.search.solved,
        stays_bytes=math.inf if found is None else found.axis.stays_bytes,
        exposed_share=1.0 if found is None else found.axis.exposed_share,
        explain=partial(explain_found, found.explained) if found is not None and explains else None,
        keeps_gathered=found is not None and not planning.gathered_again and not planning.captured.local,
    )


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What ``auto`` has found, and the base and rules that say so."""

    axis: FoundAxis
    rules: PlanSpec
    explained: SearchedAxis


def _solve_axes(planning: _Planning) -> list[tuple[list[Choices], _Found | None]]:
    """The choices on every plan axis, and what ``auto`` has found: its best first.

    The batch axes come first and as one: what they hold differently (parameters between steps) is no question of how
    to compute. The others are planned into what that has cut.
    """
    axes = planning.axes
    batch = [i for i, axis in enumerate(axes) if axis.shards_batch]
    solved: dict[int, Choices] = {}
    others = OtherAxes()
    found: list[_Found] = []
    if batch:
        joint = planning.mesh.plan_axis(tuple(name for i in batch for name in axes[i].mesh_axes))
        assert joint is not None
        captured = planning.captured
        choices = own_values(captured.graph_module.graph) if captured.local else _search(planning, joint, None, others)
        solved.update(dict.fromkeys(batch, choices))
        if planning.costs is not None and len(batch) == len(axes):
            found = _find(planning, joint, None, others, planning.costs, choices)
        others.add(joint, choices)
    for i, axis in enumerate(axes):
        if i in solved:
            continue
        if planning.costs is not None:
            assert len(solved) == len(axes) - 1, "parameters are placed on one axis beside those that share the batch"
            found = _find(planning, axis, i, others, planning.costs, None)
            return [(_in_order({**solved, i: each.axis.choices}), each) for each in found]
        solved[i] = _search(planning, axis, i, others)
        others.add(axis, solved[i])
    chosen = _in_order(solved)
    return [(chosen, each) for each in found] if found else [(chosen, None)]


def _in_order(solved: Mapping[int, Choices]) -> list[Choices]:
    return [solved[i] for i in range(len(solved))]


def _find(
    planning: _Planning,
    axis: PlanAxis,
    position: int | None,
    others: OtherAxes,
    costs: CostModel,
    fixed: Choices | None,
) -> list[_Found]:
    """What is best on one axis, and others if asked; parameters that rules name lie as those say."""
    batch = [other for other in planning.axes if other.shards_batch]
    every = free_parameters(
        planning.captured,
        planning.placeholders,
        axis,
        batch,
        planning.mesh,
        costs,
        planning.state,
        planning.gathered_again,
    )
    free = allowed_ways(every, planning.rules, planning.axes)
    placed = {each.name: planning.parameters[each.name].storage for node, each in every.items() if node not in free}
    held = {
        name: {one.name: lies for one, lies in zip(planning.axes, storage, strict=True) if one.shards_batch}
        for name, storage in placed.items()
    }
    to_plan = _axis_to_plan(planning, axis, position, others)
    producers = {node.name: producer_of(node) for node in to_plan.graph.nodes if node.op == "call_function"}
    saved = [producer for name, producer in producers.items() if name in planning.activations.saved]
    recomputed = [[producers[name] for name in again] for again in planning.activations.recomputed]
    room_bytes, with_others = planning.room_bytes, planning.with_others
    return [
        _Found(
            axis=found,
            rules=found_spec(planning.spec, axis, batch, found.parameters, held),
            explained=SearchedAxis(
                captured=planning.captured,
                search=found.search,
                every=every,
                rules=planning.rules,
                axes=planning.axes,
                axis=axis,
            ),
        )
        for found in find_axis(to_plan, axis, free, costs, fixed, room_bytes, with_others, saved, recomputed)
    ]


def _search(planning: _Planning, axis: PlanAxis, position: int | None, others: OtherAxes) -> Choices:
    return search_axis(_axis_to_plan(planning, axis, position, others))


def _left_out(planning: _Planning, why: str) -> None:
    planning.warn(f"plan {planning.spec.name}: {planning.captured.name} has values that no rule pins: {why}")


def _axis_to_plan(planning: _Planning, axis: PlanAxis, position: int | None, others: OtherAxes) -> AxisToPlan:
    """One axis to plan; ``position`` is its place among the plan axes, None for the batch axes together."""
    times: dict[tuple[Placement, Placement, int], float] = {}

    def edge_time_us(source: Placement, target: Placement, size_bytes: int) -> float:
        key = (source, target, size_bytes)
        if key not in times:
            times[key] = redistribution_time_us(source, target, size_bytes, axis.size, GENERIC)
        return times[key]

    graph = planning.captured.graph_module.graph
    pins = {node: _pin(planning, item, axis, position) for node, item in planning.placeholders.items()}
    if position is not None:
        # Rules are written for what the training step first computes with.
        strict = planning.captured.has_backward and not planning.may_miss
        pins |= edge_pins(graph, planning.rules, axis, None if strict else partial(_left_out, planning))
    return AxisToPlan(
        graph=graph,
        table=CandidateTable(axis, planning.mesh.submesh(axis.mesh_axes), GENERIC, planning.warn),
        pins=pins,
        sinks=[(node, _allowed(planning, index, axis, position)) for index, node in enumerate(output_nodes(graph))],
        edge_time_us=edge_time_us,
        launch_us=GENERIC.link_latency_us if position is None else 0.0,
        parameters=frozenset(n for n, item in planning.placeholders.items() if item.kind == "parameter"),
        is_batch_axis=position is None,
        reduced_late=late_reductions(planning.captured),
        cut_already=others.cuts,
        fits=others.fit(axis),
        size_bytes=others.size_bytes,
    )


def output_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The values a normalised graph returns, in order."""
    (output,) = [node for node in graph.nodes if node.op == "output"]
    return list(output.args[0])  # type: ignore[arg-type]


def _pin(planning: _Planning, item: GraphInput, axis: PlanAxis, position: int | None) -> Placement:
    if item.kind == "parameter":
        return Replicate() if position is None else planning.parameters[item.name].compute[position]
    if not axis.shards_batch:
        return Replicate()
    if item.kind == "batch" and item.batched:
        return Shard(0)
    if item.kind == "tangent":
        # The gradient of a result has the result's placement.
        return _result_placement(
            next(result for result in planning.captured.outputs if (result.kind, result.name) == ("output", item.name))
        )
    return Replicate()


def _result_placement(item: GraphOutput) -> Placement:
    """A result that carries the batch keeps its rows on the rank that owns them."""
    return Replicate() if item.batch_dim is None else Shard(item.batch_dim)


def _allowed(planning: _Planning, index: int, axis: PlanAxis, position: int | None) -> tuple[Placement, ...]:
    """Where output ``index`` may end: results keep their rows on the rank that owns them, everything else is whole."""
    item = planning.captured.outputs[index]
    if item.is_parameter_gradient and position is not None:
        placed = planning.parameters[item.name]
        # What lies in shards of what is computed whole is reduced into them.
        return tuple(dict.fromkeys((placed.compute[position], placed.storage[position])))
    if not axis.shards_batch:
        return (Replicate(),)
    if item.kind in ("output", "log"):
        return (_result_placement(item),)
    if item.is_parameter_gradient:
        return (Replicate(), Shard(0))
    return (Replicate(),)


def _output_placements(planning: _Planning) -> tuple[Placements | None, ...]:
    placements: list[Placements | None] = []
    for index, item in enumerate(planning.captured.outputs):
        if item.is_parameter_gradient:
            placements.append(planning.parameters[item.name].storage)
        else:
            placements.append(tuple(_allowed(planning, index, axis, None)[0] for axis in planning.axes))
    return tuple(placements)


def _combine(graph: fx.Graph, solved: Sequence[Choices]) -> dict[str, NodePlacement]:
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
