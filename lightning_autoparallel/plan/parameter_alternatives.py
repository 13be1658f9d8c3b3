"""Parameters whose placement on an axis is to be found: what each alternative takes outside of the graph's calls.

Between steps the axes that share out the batch cut every parameter (``fsdp``): it is gathered for the forward and for
the backward, and its gradient is reduced and scattered, beside what computes. Latencies are not counted, which buckets
share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement, Replicate

from lightning_autoparallel.contracts import CapturedGraph, GraphInput, PlanAxis
from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.cost.optimizer import update_time_us
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import is_shard, shard
from lightning_autoparallel.plan.candidates import Candidate

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class FreeParameter:
    """A parameter whose placement is to be found: its name, its alternatives, and the gradient that must end as it.

    ``gathered_us`` is what its shards on the batch axes take to gather before the forward, ``reduced_us`` what it takes
    in the backward, to gather them again and to reduce the gradient: for each alternative, beside what computes.
    """

    name: str
    candidates: tuple[Candidate, ...]
    gradient: fx.Node | None
    gathered_us: tuple[float, ...]
    reduced_us: tuple[float, ...]


def free_parameters(
    captured: CapturedGraph,
    placeholders: Mapping[fx.Node, GraphInput],
    axis: PlanAxis,
    batch_axis: PlanAxis | None,
    costs: CostModel,
) -> dict[fx.Node, FreeParameter]:
    """Every parameter, whole or cut along any dim that ``axis`` divides, where ``batch_axis`` shares out the batch."""
    (output,) = captured.graph_module.graph.find_nodes(op="output")
    ends = zip(captured.outputs, output.args[0], strict=True)
    gradients: dict[str, fx.Node] = {item.name: node for item, node in ends if item.is_parameter_gradient}
    making = _Alternatives(axis, batch_axis, costs)
    return {
        node: making.of(node, item.name, gradients.get(item.name))
        for node, item in placeholders.items()
        if item.kind == "parameter"
    }


class _Alternatives:
    def __init__(self, axis: PlanAxis, batch_axis: PlanAxis | None, costs: CostModel) -> None:
        self._axis, self._batch_axis, self._costs = axis, batch_axis, costs

    def of(self, node: fx.Node, name: str, gradient: fx.Node | None) -> FreeParameter:
        value = node.meta["val"]
        dims = [dim for dim, size in enumerate(value.shape) if size and size % self._axis.size == 0]
        placements: list[Placement] = [Replicate(), *map(shard, dims)]
        parts = [self._axis.size if is_shard(placement) else 1 for placement in placements]
        batch_shards = 1 if self._batch_axis is None else self._batch_axis.size
        stored, used = fxn.size_bytes(value), value.numel() * _computed_itemsize(node)
        trained = gradient is not None
        times = [
            update_time_us(stored / part / batch_shards, self._costs.hardware) if trained else 0.0 for part in parts
        ]
        gathered = [self._moving_us("all_gather", used / part) for part in parts]
        reduced = [self._moving_us("reduce_scatter", stored / part) if trained else 0.0 for part in parts]
        return FreeParameter(
            name=name,
            candidates=tuple(
                Candidate(outputs=(placement,), inputs=(), time_us=time_us)
                for placement, time_us in zip(placements, times, strict=True)
            ),
            gradient=gradient,
            gathered_us=tuple(gathered),
            reduced_us=tuple(once + more for once, more in zip(gathered, reduced, strict=True)),
        )

    def _moving_us(self, kind: str, size_bytes: float) -> float:
        if self._batch_axis is None:
            return 0.0
        return self._costs.moving_time_us(kind, size_bytes, self._batch_axis.group_name)


def _computed_itemsize(node: fx.Node) -> int:
    """Bytes of an element in the dtype that a parameter is cast to before anything reads it."""
    casts = [user.meta["val"].dtype.itemsize for user in node.users if user.target is aten._to_copy.default]
    return int(min([node.meta["val"].dtype.itemsize, *casts]))
