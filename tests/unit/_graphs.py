"""Captured graphs of hand-made modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_autoparallel.capture import (
    NoEffects,
    StepEffects,
    StepRequest,
    TensorSpec,
    capture_step,
    describe_batch,
    flatten_batch,
)
from lightning_autoparallel.contracts import (
    CapturedGraph,
    CompiledStep,
    GraphCallable,
    GraphInput,
    GraphOutput,
    PartitionedGraph,
    PlanReport,
    ShardedGraph,
)


def request_of(
    module: nn.Module,
    batch: Any,
    run: Callable[[Any], Any] | None = None,
    *,
    shards: int = 1,
    training: bool = True,
    effects: StepEffects | None = None,
    notice: Callable[[str], None] = lambda message: None,
) -> StepRequest:
    """A request for ``run(batch)`` (the module's forward unless given) on local batches like ``batch``."""
    leaves, rebuild = flatten_batch(batch)
    step = run or module
    return StepRequest(
        name="step",
        module=module,
        run=lambda values: step(rebuild(values)),
        parameters={name: TensorSpec.of(parameter) for name, parameter in module.named_parameters()},
        buffers={name: TensorSpec.of(buffer) for name, buffer in module.named_buffers()},
        layout=describe_batch(leaves),
        static_leaves={i: leaf for i, (_, leaf) in enumerate(leaves) if not isinstance(leaf, Tensor)},
        batch_shards=shards,
        device=torch.device("cpu"),
        effects=effects or NoEffects(),
        training=training,
        notice=notice,
    )


def captured(module: nn.Module, batch: Any, run: Callable[[Any], Any] | None = None, **options: Any) -> CapturedGraph:
    """The captured step; see ``request_of``."""
    return capture_step(request_of(module, batch, run, **options))


def run_captured(graph: CapturedGraph, module: nn.Module, batch: Any, tangent: float = 1.0) -> dict[Any, Tensor]:
    """The outputs of a captured graph on real values, by kind and name."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    leaves = dict(flatten_batch(batch)[0])
    values = []
    for node, item in zip(graph.graph_module.graph.find_nodes(op="placeholder"), graph.inputs, strict=True):
        table = {"parameter": parameters, "buffer": buffers, "batch": leaves, "constant": graph.constants}
        tangents = torch.full(node.meta["val"].shape, tangent)
        values.append(tangents if item.kind == "tangent" else table[item.kind][item.name].detach())
    results = graph.graph_module(*values)
    return {(item.kind, item.name): value for item, value in zip(graph.outputs, results, strict=True)}


def report_of(**known: Any) -> PlanReport:
    """A report of a step about which nothing else is known."""
    nothing: dict[str, Any] = {"graph": "step", "mesh": {"dp_shard": 2}, "plan": "fsdp", "timings_s": {}}
    nothing |= {"collectives": {}, "saved_bytes": 0, "parameters_bytes": 0, "gradients_bytes": 0}
    return PlanReport(**{**nothing, **known})


def step_of(
    inputs: Sequence[GraphInput],
    outputs: Sequence[GraphOutput],
    forward: GraphCallable,
    backward: GraphCallable | None,
    *,
    tangents: Sequence[Tensor] = (),
    constants: Sequence[Tensor] = (),
    saved_inputs: Sequence[int] = (),
    saved_values: int = 0,
) -> CompiledStep:
    """A step of these two callables; its graphs have no calls, the backward's takes what lies as ``tangents`` do."""
    module, graph = fx.GraphModule(nn.Module(), fx.Graph()), fx.Graph()
    for i, tangent in enumerate(tangents):
        graph.placeholder(f"tangent_{i}").meta["val"] = tangent
    graph.output(())
    sharded = ShardedGraph(
        name="step",
        graph_module=module,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        output_placements=(None,) * len(outputs),
        axes=(),
        has_backward=True,
    )
    partitioned = PartitionedGraph(
        sharded=sharded,
        forward=module,
        backward=fx.GraphModule(nn.Module(), graph),
        saved_inputs=tuple(saved_inputs),
        saved_values=saved_values,
    )
    captured_graph = CapturedGraph(
        name="step", graph_module=module, inputs=tuple(inputs), outputs=tuple(outputs), output_spec=None
    )
    return CompiledStep(
        partitioned=partitioned,
        forward=forward,
        backward=backward,
        captured=captured_graph,
        constants=tuple(constants),
        report=report_of(mesh={}),
    )
