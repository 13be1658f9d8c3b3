"""What was planned, counted in the final graphs: the report of one captured step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Placement

from lightning_autoparallel.contracts import (
    CapturedGraph,
    CollectiveTable,
    ModuleReport,
    ParameterReport,
    PartitionedGraph,
    PassReport,
    PlanReport,
    ShardingPlan,
)
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.pipeline.placed_calls import placed_calls


def make_report(
    captured: CapturedGraph,
    partitioned: PartitionedGraph,
    plan: ShardingPlan,
    passes: tuple[PassReport, ...],
    timings_s: Mapping[str, float],
    mesh: ParallelMesh,
) -> PlanReport:
    """The report of a step after its last pass; what optimizers keep is not known here."""
    graphs = {name: half.graph for name, half in partitioned.graphs().items()}
    axes = mesh.axes_by_group()
    parameters = _parameters(captured, partitioned, plan)
    saved = _saved(partitioned)
    return PlanReport(
        graph=captured.name,
        mesh=mesh.sizes,
        plan=plan.name,
        timings_s=timings_s,
        collectives={name: fxn.count_collectives(graph, axes) for name, graph in graphs.items()},
        saved_bytes=sum(fxn.size_bytes(node.meta["val"]) for node in saved),
        parameters_bytes=sum(parameter.parameter_bytes for parameter in parameters.values()),
        gradients_bytes=sum(parameter.gradient_bytes for parameter in parameters.values()),
        parameters=parameters,
        modules=_modules(graphs, saved, axes),
        calls=placed_calls(captured, plan),
        passes=passes,
        solved=plan.solved,
    )


def with_optimizer_bytes(report: PlanReport, by_parameter: Mapping[str, int]) -> PlanReport:
    """The report with the bytes of optimizer state that each parameter needs; 0 for those that are not named."""
    parameters = {
        name: dataclasses.replace(parameter, optimizer_bytes=by_parameter.get(name, 0))
        for name, parameter in report.parameters.items()
    }
    return dataclasses.replace(report, parameters=parameters, optimizer_bytes=sum(by_parameter.values()))


def with_inference(report: PlanReport, inference: PlanReport) -> PlanReport:
    """The report of a training step with the collectives and costs of another, and the time that planning it took."""
    seconds = {stage: spent + inference.timings_s.get(stage, 0.0) for stage, spent in report.timings_s.items()}
    collectives = {**report.collectives, "inference": inference.collectives["inference"]}
    return dataclasses.replace(
        report,
        timings_s=seconds,
        collectives=collectives,
        passes=(*report.passes, *inference.passes),
        predictions={**report.predictions, **inference.predictions},
        notes=tuple(dict.fromkeys((*report.notes, *inference.notes))),
    )


def _parameters(
    captured: CapturedGraph, partitioned: PartitionedGraph, plan: ShardingPlan
) -> dict[str, ParameterReport]:
    sharded = partitioned.sharded
    whole = dict(zip((item.name for item in captured.inputs), _placeholders(captured.graph_module), strict=True))
    gradients = _gradients(partitioned)
    reports = {}
    for item, node in zip(sharded.inputs, _placeholders(sharded.graph_module), strict=True):
        if item.kind == "parameter":
            local: Tensor = node.meta["val"]
            reports[item.name] = ParameterReport(
                shape=tuple(whole[item.name].meta["val"].shape),
                local_shape=tuple(local.shape),
                dtype=_dtype_name(local.dtype),
                placements=_placements(plan, item.name),
                parameter_bytes=fxn.size_bytes(local),
                gradient_bytes=gradients.get(item.name, 0),
            )
    return reports


def _gradients(partitioned: PartitionedGraph) -> dict[str, int]:
    """Bytes of every gradient as the backward gives it."""
    results = _results(partitioned.sharded.graph_module)
    pairs = zip(partitioned.sharded.outputs, results, strict=True)
    return {item.name: fxn.size_bytes(node.meta["val"]) for item, node in pairs if item.is_parameter_gradient}


def _placements(plan: ShardingPlan, name: str) -> dict[str, str]:
    """Mesh axes (joined by a comma where a plan treats several as one) to ``R`` or ``S(dim)``."""
    pairs = zip(plan.axes, plan.parameters[name], strict=True)
    return {axis.name: "R" if placement.is_replicate() else f"S({_dim(placement)})" for axis, placement in pairs}


def _dim(placement: Placement) -> int:
    # Strided shards are cut along a dim too, after another axis has cut it, and are no Shard to torch.
    return placement.dim  # type: ignore[attr-defined]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _saved(partitioned: PartitionedGraph) -> list[fx.Node]:
    """The values that the forward hands to the backward, its inputs not among them."""
    if not partitioned.saved_values:
        return []
    return [node for node in _results(partitioned.forward)[-partitioned.saved_values :] if isinstance(node, fx.Node)]


def _modules(
    graphs: Mapping[str, fx.Graph], saved: list[fx.Node], axes_by_group: Mapping[str, str]
) -> tuple[ModuleReport, ...]:
    """One report per module in the order of its first call, modules that neither save nor launch left out."""
    kept: dict[str, int] = {}
    for node in saved:
        kept[_path(node)] = kept.get(_path(node), 0) + fxn.size_bytes(node.meta["val"])
    launched: dict[str, dict[str, list[fx.Node]]] = {}
    for name, graph in graphs.items():
        for node in fxn.collectives_of(graph):
            launched.setdefault(_path(node), {}).setdefault(name, []).append(node)
    order = dict.fromkeys(_path(node) for graph in graphs.values() for node in graph.nodes)
    return tuple(
        ModuleReport(
            path=path, saved_bytes=kept.get(path, 0), collectives=_tables(launched.get(path, {}), axes_by_group)
        )
        for path in order
        if path in kept or path in launched
    )


def _tables(launched: Mapping[str, list[fx.Node]], axes_by_group: Mapping[str, str]) -> dict[str, CollectiveTable]:
    return {name: fxn.tabulate_collectives(nodes, axes_by_group) for name, nodes in launched.items()}


def _path(node: fx.Node) -> str:
    return fxn.module_path(node) or ""


def _placeholders(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    return (node for node in graph_module.graph.nodes if node.op == "placeholder")


def _results(graph_module: fx.GraphModule) -> list[fx.Node]:
    (output,) = [node for node in graph_module.graph.nodes if node.op == "output"]
    return list(output.args[0])  # type: ignore[arg-type]
