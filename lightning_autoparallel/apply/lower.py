"""``lower_graph``: every node on local shards, redistributions written in between."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Partial, Replicate

from lightning_autoparallel.apply.aliases import eliminate_alias_round_trips
from lightning_autoparallel.apply.attention_layout import in_kernels_layout
from lightning_autoparallel.apply.attention_masks import check_masks
from lightning_autoparallel.apply.einsum_form import emit_product
from lightning_autoparallel.apply.emit import GraphEmitter
from lightning_autoparallel.apply.group_choice import OrderedAxis
from lightning_autoparallel.apply.redistribute import redistribute
from lightning_autoparallel.apply.vocabulary import expand_along_vocabulary
from lightning_autoparallel.contracts import CapturedGraph, GraphOutput, Placements, ShardedGraph, ShardingPlan
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import local_shape
from lightning_autoparallel.torch_compat import collectives
from lightning_autoparallel.torch_compat.graph_modules import graph_module
from lightning_autoparallel.torch_compat.tracing import fake_mode_of

aten = torch.ops.aten

# Which argument of an operator is the shape of its result, and so must become local.
_SHAPE_ARGUMENT = {
    aten.view.default: 1,
    aten.expand.default: 1,
    aten.full.default: 0,
    aten.rand.default: 0,
    aten.randn.default: 0,
    aten.randint.default: 1,
    aten.randint.low: 2,
    aten.slice_backward.default: 1,
    aten.select_backward.default: 1,
    aten.upsample_nearest1d_backward.default: 2,
    aten.upsample_nearest2d_backward.default: 2,
    aten.upsample_nearest3d_backward.default: 2,
    aten.upsample_linear1d_backward.default: 2,
    aten.upsample_bilinear2d_backward.default: 2,
    aten.upsample_bicubic2d_backward.default: 2,
    aten.upsample_trilinear3d_backward.default: 2,
    aten._upsample_nearest_exact1d_backward.default: 2,
    aten._upsample_nearest_exact2d_backward.default: 2,
    aten._upsample_nearest_exact3d_backward.default: 2,
    aten._upsample_bilinear2d_aa_backward.default: 2,
    aten._upsample_bicubic2d_aa_backward.default: 2,
}


def lower_graph(captured: CapturedGraph, plan: ShardingPlan, ordered: OrderedAxis | None = None) -> ShardedGraph:
    """The graph that each rank runs: the global program's nodes on local shapes, in the plan's placements.

    ``ordered`` is asked for process groups whose ranks count in another order than the mesh's.
    """
    captured, plan, _ = eliminate_alias_round_trips(captured, plan)
    lowering = _Lowering(captured, plan, ordered)
    for node in captured.graph_module.graph.nodes:
        lowering.lower(node)
    module = graph_module(torch.nn.Module(), lowering.emitter.graph)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    return ShardedGraph(
        name=captured.name,
        graph_module=module,
        inputs=captured.inputs,
        outputs=captured.outputs,
        output_placements=plan.outputs,
        axes=plan.axes,
        has_backward=captured.has_backward,
    )


class _Lowering:
    """Walks the captured graph once; remembers each value in every placement it was needed in."""

    def __init__(self, captured: CapturedGraph, plan: ShardingPlan, ordered: OrderedAxis | None) -> None:
        self._captured, self._plan, self._ordered = captured, plan, ordered
        nodes = list(captured.graph_module.graph.nodes)
        (output,) = [node for node in nodes if node.op == "output"]
        results: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
        self._ends = [
            (result, item, placed)
            for result, item, placed in zip(results, captured.outputs, plan.outputs, strict=True)
            if placed is not None
        ]
        self._leaving: dict[fx.Node, list[tuple[GraphOutput, Placements]]] = defaultdict(list)
        for result, item, placed in self._ends:
            self._leaving[result].append((item, placed))
        self.emitter = GraphEmitter(fake_mode_of(next(v for n in nodes for v in fxn.values(n) if v is not None)))
        self._placed: dict[tuple[fx.Node, Placements], fx.Node] = {}
        self._averaged: dict[tuple[fx.Node, Placements], fx.Node] = {}
        self._stored: dict[fx.Node, Placements] = {}
        self._inputs = dict(zip([n for n in nodes if n.op == "placeholder"], captured.inputs, strict=True))

    def lower(self, node: fx.Node) -> None:
        """Emit one node of the captured graph, and the reductions of its value that leave the graph."""
        if node.op == "output":
            self.emitter.graph.output([self._out(*end) for end in self._ends])
            return
        self.emitter.on_behalf_of(node)
        if node.op == "placeholder":
            self._lower_placeholder(node)
        else:
            self._lower_call(node)
        # A gradient is reduced as soon as it is there: its collective can run beside the rest of the backward.
        for item, placed in self._leaving.get(node, ()):
            self._out(node, item, placed)

    def _out(self, node: fx.Node, item: GraphOutput, placed: Placements) -> fx.Node:
        """A result where it leaves the graph: of a local program's gradients the mean over the batch shards."""
        if not (self._captured.local and item.is_parameter_gradient):
            return self._in(node, placed)
        if (node, placed) not in self._averaged:
            stored = self._stored[node]
            pairs = zip(stored, self._plan.axes, strict=True)
            own = tuple(Partial("avg") if axis.shards_batch else placement for placement, axis in pairs)
            moved = self._moved(self._placed[(node, stored)], node.meta["val"].shape, own, placed)
            self._averaged[(node, placed)] = moved
        return self._averaged[(node, placed)]

    def _lower_placeholder(self, node: fx.Node) -> None:
        item = self._inputs[node]
        stored = self._plan.nodes[node.name].outputs[0]
        if item.kind == "parameter":
            stored = self._plan.parameters[item.name]
        assert stored is not None
        value: Tensor = node.meta["val"]
        shape = local_shape(value.shape, stored, self._plan.axes)
        with self.emitter.fake_mode:
            # Without shards the local tensor is the global one, strides included.
            local = (
                torch.empty(shape, dtype=value.dtype, device=value.device)
                if shape != list(value.shape)
                else value.detach()
            )
        self._stored[node] = stored
        self._placed[(node, stored)] = self.emitter.placeholder(node.name, local)

    def _lower_call(self, node: fx.Node) -> None:
        placement = self._plan.nodes[node.name]
        if fxn.is_getitem(node):
            source, index = node.args
            assert isinstance(source, fx.Node)
            lowered = self.emitter.call(node.target, self._placed[(source, ())], index, name=node.name)
            self._keep(node, placement.outputs[0], lowered)
            return
        check_masks(node, self._plan, self._captured.local)
        wanted = iter(placement.inputs)
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda argument: self._in(argument, next(wanted)))
        args = in_kernels_layout(self.emitter, node.target, args)
        lowered = self._emit(node, args, kwargs, placement.outputs[0])
        if isinstance(node.meta["val"], (tuple, list)):
            self._placed[(node, ())] = lowered
        else:
            self._keep(node, placement.outputs[0], lowered)

    def _emit(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], placed: Placements | None) -> fx.Node:
        if node.target is aten.alias.default:
            return args[0]  # type: ignore[no-any-return]
        if node.target is aten.einsum.default:
            equation, (left, right) = args
            return emit_product(self.emitter, equation, left, right, node.name)
        expanded = expand_along_vocabulary(self.emitter, node, args, self._plan.nodes[node.name], self._plan)
        if expanded is not None:
            return expanded
        if fxn.is_random(node) and isinstance(node.meta["val"], Tensor):
            assert placed is not None
            return self._draw(node, args, kwargs, placed)
        return self._call_local(node, args, kwargs, placed, node.name)

    def _call_local(
        self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], placed: Placements | None, name: str | None
    ) -> fx.Node:
        """The operator itself, the shape that it is given made local."""
        position = _SHAPE_ARGUMENT.get(node.target)  # type: ignore[call-overload]
        if position is not None:
            assert placed is not None
            shape = local_shape(node.meta["val"].shape, placed, self._plan.axes)
            if node.target is aten.view.default:
                return self.emitter.view(args[0], shape, name=name)
            args = (*args[:position], shape, *args[position + 1 :])
        return self.emitter.call(node.target, *args, name=name, **kwargs)

    def _draw(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], placed: Placements) -> fx.Node:
        """Random values that differ between shards and agree between replicas.

        Ranks of different batch shards draw from different seeds: what must agree there is sent by the first of them,
        but in a local program nothing must.
        Ranks of one batch shard draw alike: each draws for all of them and keeps its own part.
        """
        drawn = tuple(p if axis.shards_batch else Replicate() for p, axis in zip(placed, self._plan.axes, strict=True))
        lowered = self._call_local(node, args, kwargs, drawn, None)
        for placement, axis in zip(placed, self._plan.axes, strict=True):
            if axis.shards_batch and isinstance(placement, Replicate) and not self._captured.local:
                sent = self.emitter.call(collectives.BROADCAST, lowered, 0, axis.group_name)
                lowered = self.emitter.call(collectives.WAIT, sent)
        return self._moved(lowered, node.meta["val"].shape, drawn, placed)

    def _moved(self, node: fx.Node, shape: torch.Size, source: Placements, target: Placements) -> fx.Node:
        return redistribute(
            self.emitter, node, shape, source, target, self._plan.axes, self._plan.joint_axes, self._ordered
        )

    def _keep(self, node: fx.Node, placed: Placements | None, lowered: fx.Node) -> None:
        assert placed is not None, f"{node.name} is no tensor"
        expected = local_shape(node.meta["val"].shape, placed, self._plan.axes)
        actual = list(lowered.meta["val"].shape)
        assert actual == expected, (
            f"{fxn.describe(node)}: local shape {actual}, its placement {placed} means {expected}"
        )
        self._stored[node] = placed
        self._placed[(node, placed)] = lowered

    def _in(self, node: fx.Node, target: Placements) -> fx.Node:
        if (node, target) not in self._placed:
            stored = self._stored[node]
            source = self._placed[(node, stored)]
            self._placed[(node, target)] = self._moved(source, node.meta["val"].shape, stored, target)
        return self._placed[(node, target)]
