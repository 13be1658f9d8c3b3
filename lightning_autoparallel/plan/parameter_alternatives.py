"""Where a parameter may lie between steps, and what steps may compute with: what each alternative takes beside calls.

On the planned axis steps compute with the whole parameter or with a shard of it. Between steps what is computed whole
may lie in shards of any of the axes that share out the batch, and of the planned one: it is gathered for the forward
and for the backward, and its gradient is reduced and scattered, beside what computes. A launch's latency is shared by
all parameters of a block. Data parallelism, its sharded kinds and tensor parallelism are outcomes, for each parameter
by itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from lightning_autoparallel.config import STORED, PlanRule
from lightning_autoparallel.contracts import CapturedGraph, GraphInput, PlanAxis
from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.cost.optimizer import ADAMW, OptimizerState, update_time_us
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import dim_of, is_shard, shard
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.plan.candidates import Candidate
from lightning_autoparallel.plan.parameter_storage import rule_placement

aten = torch.ops.aten
SUM = Partial("sum")
_COPIES = 2  # parameter, gradient
_BLOCKS_AT_ONCE = 2  # that are gathered: one is computed with, the next one is under way


@dataclass(frozen=True, kw_only=True)
class Lying:
    """One way for a parameter: ``computed`` on the planned axis, ``stored`` dims by the axes that cut it between steps.

    Its gradient ends as ``end``. ``update_us`` is the optimizer's time, a micro-batch's share of it, and that of taking
    a rank's part of a gradient of which it has more; ``copied_us`` that of kernels that put together what was gathered
    along another dim than the first; ``gathered_us`` what gathering takes before the forward, ``reduced_us`` what the
    backward takes, to gather again what it reads, if it does, and to reduce the gradient. ``size_bytes`` is what stays
    on a rank: the parameter, its gradient, what an optimizer keeps of it, and ``gathered_bytes`` that stay until the
    backward; ``passing_bytes`` is there beside that while its block is computed.
    """

    computed: Placement
    stored: Mapping[str, int]
    end: Placement
    update_us: float
    copied_us: float
    gathered_us: float
    reduced_us: float
    size_bytes: float
    passing_bytes: float = 0.0
    gathered_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FreeParameter:
    """A parameter whose placement is to be found: its alternatives, and the gradient that must end as they say."""

    name: str
    ways: tuple[Lying, ...]
    gradient: fx.Node | None

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """What a step finds in each of the ``ways``."""
        return tuple(
            Candidate(outputs=(way.computed,), inputs=(), time_us=way.update_us + way.copied_us) for way in self.ways
        )


def free_parameters(
    captured: CapturedGraph,
    placeholders: Mapping[fx.Node, GraphInput],
    axis: PlanAxis,
    batch_axes: Sequence[PlanAxis],
    mesh: ParallelMesh,
    costs: CostModel,
    state: OptimizerState = ADAMW,
    gathered_again: bool = True,
) -> dict[fx.Node, FreeParameter]:
    """Every parameter, in all the ways that it may lie on ``axis`` and on ``batch_axes``, which share out the batch.

    What the backward reads is ``gathered_again`` for it, or stays on a rank as it was gathered for the forward.
    """
    (output,) = captured.graph_module.graph.find_nodes(op="output")
    ends = zip(captured.outputs, output.args[0], strict=True)
    gradients: dict[str, fx.Node] = {item.name: node for item, node in ends if item.is_parameter_gradient}
    parameters = {node: item.name for node, item in placeholders.items() if item.kind == "parameter"}
    sharing = Counter(map(fxn.block_of, parameters.values()))
    found = {}
    for node, name in parameters.items():
        gradient = gradients.get(name)
        shared = sharing[fxn.block_of(name)]
        making = _Ways(axis, batch_axes, mesh, costs, shared, state.of(name), state.micro_batches, gathered_again)
        found[node] = FreeParameter(name=name, ways=making.of(node, gradient is not None), gradient=gradient)
    return found


class _Ways:
    """Of a parameter that has its launches together with others, ``sharing`` of them in all."""

    def __init__(
        self,
        axis: PlanAxis,
        batch_axes: Sequence[PlanAxis],
        mesh: ParallelMesh,
        costs: CostModel,
        sharing: int,
        state_per_byte: float,
        micro_batches: int,
        gathered_again: bool,
    ) -> None:
        self._axis, self._batch_axes, self._mesh, self._costs = axis, list(batch_axes), mesh, costs
        self._sharing, self._state_per_byte, self._micro_batches = sharing, state_per_byte, micro_batches
        self._gathered_again = gathered_again

    def of(self, node: fx.Node, is_trained: bool) -> tuple[Lying, ...]:
        value = node.meta["val"]
        used_bytes = value.numel() * _computed_itemsize(node)
        is_read_again = _is_read_backward(node)
        return tuple(
            self._way(computed, stored, end, value, used_bytes, is_trained, is_read_again)
            for computed, stored in self._lyings(tuple(value.shape))
            for end in self._ends(computed, is_trained)
        )

    def _lyings(self, shape: tuple[int, ...]) -> Iterator[tuple[Placement, dict[str, int]]]:
        """What is computed with, and the dims that axes cut between steps."""
        shards = [] if self._axis.shards_batch else self._even(shape, self._axis.size)
        for computed in (Replicate(), *map(shard, shards)):
            for chosen in self._cutting(computed):
                stored = self._stored_dims(shape, computed, chosen)
                if stored is not None:
                    yield computed, stored
                if len(chosen) == 1 and self._has_padding(shape, computed, chosen[0]):
                    yield computed, {chosen[0].name: 0}

    def _cutting(self, computed: Placement) -> Iterator[list[PlanAxis]]:
        """Axes that may cut a parameter between steps, beside what is computed: inner batch axes before outer ones."""
        batch = [self._batch_axes[i:] for i in range(len(self._batch_axes), -1, -1)]
        own = [[], [self._axis]] if computed.is_replicate() and not self._axis.shards_batch else [[]]
        for outer, inner in itertools.product(batch, own):
            yield [*outer, *inner]

    def _stored_dims(
        self, shape: tuple[int, ...], computed: Placement, axes: Sequence[PlanAxis]
    ) -> dict[str, int] | None:
        """The dim that each of the axes cuts: the first, and where that does not divide by all of them another one.

        Where several axes cut, it is none that steps compute with a part of (``parameter_storage._with_shard``).
        """
        if not shape:
            return None if axes else {}
        found: dict[str, int] = {}
        parts = [1] * len(shape)
        if is_shard(computed):
            parts[dim_of(computed)] = self._axis.size
        for axis in axes:
            taken = dim_of(computed) if is_shard(computed) and len(axes) > 1 else None
            even = [dim for dim, size in enumerate(shape) if size and size % (parts[dim] * axis.size) == 0]
            dims = [dim for dim in even if dim != taken]
            if not dims:
                return None
            found[axis.name] = dims[0]
            parts[dims[0]] *= axis.size
        return found

    def _has_padding(self, shape: tuple[int, ...], computed: Placement, axis: PlanAxis) -> bool:
        """Whether one axis may cut the first dim, and not evenly: unlike any other dim it is gathered in one piece."""
        is_whole = not is_shard(computed) or dim_of(computed) != 0
        return is_whole and bool(shape) and shape[0] > axis.size and shape[0] % axis.size != 0

    def _even(self, shape: tuple[int, ...], parts: int) -> list[int]:
        return [dim for dim, size in enumerate(shape) if size and size % parts == 0]

    def _ends(self, computed: Placement, is_trained: bool) -> tuple[Placement, ...]:
        """How the gradient may come: in parts that are yet to be added up over the axis, or as the parameter is."""
        if self._axis.shards_batch:
            return (SUM,)
        return (SUM, computed) if is_trained and computed.is_replicate() else (computed,)

    def _way(
        self,
        computed: Placement,
        stored: dict[str, int],
        end: Placement,
        value: torch.Tensor,
        used_bytes: float,
        is_trained: bool,
        is_read_again: bool,
    ) -> Lying:
        own = self._axis.size if is_shard(computed) else 1
        own_axis = [] if self._axis.shards_batch else [self._axis]
        cutting = [axis for axis in (*self._batch_axes, *own_axis) if axis.name in stored]
        size_bytes = fxn.size_bytes(value)
        kept_bytes = size_bytes / own / math.prod(axis.size for axis in cutting) * _padded(value.shape, stored, cutting)
        gathered_us = self._moving_us("all_gather", used_bytes / own, cutting)
        reduced_us = self._reduced_us(size_bytes / own, stored, end) if is_trained else 0.0
        copied_us = self._costs.hardware.copy_time_us(used_bytes / own) if any(stored.values()) else 0.0
        is_gathered_again = is_read_again and self._gathered_again
        stays_gathered = bool(cutting) and is_read_again and not self._gathered_again
        gathered_bytes = used_bytes / own if stays_gathered else 0.0
        return Lying(
            computed=computed,
            stored=stored,
            end=end,
            update_us=self._update_us(kept_bytes, stored, end) if is_trained else 0.0,
            copied_us=copied_us * (2 if is_gathered_again else 1),
            gathered_us=gathered_us,
            reduced_us=(gathered_us if is_gathered_again else 0.0) + reduced_us,
            size_bytes=kept_bytes * (_COPIES + self._state_per_byte if is_trained else 1) + gathered_bytes,
            passing_bytes=_passing_bytes(size_bytes / own, used_bytes / own - gathered_bytes, kept_bytes, is_trained),
            gathered_bytes=gathered_bytes,
        )

    def _update_us(self, kept_bytes: float, stored: Mapping[str, int], end: Placement) -> float:
        """Taking a part of a gradient is a kernel more, whose bytes the next reader is spared."""
        hardware = self._costs.hardware
        has_more = self._axis.name in stored and not self._axis.shards_batch and end.is_replicate()
        update_us = update_time_us(kept_bytes, hardware, self._state_per_byte) / self._micro_batches
        return update_us + (hardware.kernel_latency_us if has_more else 0.0)

    def _reduced_us(self, size_bytes: float, stored: Mapping[str, int], end: Placement) -> float:
        """A gradient is scattered over axes that cut the parameter, then what is left is added up over the others.

        Where ranks of the axis have it whole, each takes its part before that.
        """
        own = [self._axis] if end.is_partial() and not self._axis.shards_batch else []
        adding = [*self._batch_axes, *own]
        if self._axis.name in stored and self._axis not in adding:
            size_bytes /= self._axis.size
        scattered = [axis for axis in adding if axis.name in stored]
        rest = [axis for axis in adding if axis.name not in stored]
        part_bytes = size_bytes / math.prod(axis.size for axis in scattered)
        scattered_us = self._moving_us("reduce_scatter", size_bytes, scattered)
        return scattered_us + self._moving_us("all_reduce", part_bytes, rest)

    def _moving_us(self, kind: str, size_bytes: float, axes: Sequence[PlanAxis]) -> float:
        joint = self._mesh.plan_axis(tuple(name for axis in self._in_order(axes) for name in axis.mesh_axes))
        if joint is None:
            return 0.0
        moving_us = self._costs.moving_time_us(kind, size_bytes, joint.group_name)
        whole_us = self._costs.launch_time_us(kind, math.ceil(size_bytes), joint.group_name)
        return moving_us + (whole_us - moving_us) / self._sharing

    def _in_order(self, axes: Sequence[PlanAxis]) -> list[PlanAxis]:
        return sorted(axes, key=lambda axis: self._mesh.spec.names.index(axis.mesh_axes[0]))


def _padded(shape: Sequence[int], stored: Mapping[str, int], cutting: Sequence[PlanAxis]) -> float:
    """How much more than its share a rank keeps, where one axis cuts the first dim and not evenly."""
    if len(cutting) != 1 or stored[cutting[0].name] != 0 or shape[0] % cutting[0].size == 0:
        return 1.0
    return math.ceil(shape[0] / cutting[0].size) * cutting[0].size / shape[0]


def _is_read_backward(parameter: fx.Node) -> bool:
    """Whether the backward reads it, or what follows from it alone: the table of a look-up is not gathered again."""
    pending = [parameter]
    while pending:
        node = pending.pop()
        for user in node.users:
            if fxn.is_backward(user):
                return True
            if user.op == "call_function" and user.all_input_nodes == [node]:
                pending.append(user)
    return False


def _passing_bytes(whole_bytes: float, used_bytes: float, kept_bytes: float, is_trained: bool) -> float:
    """Of what is gathered: this block's and the next one's, and a gradient until it is scattered."""
    if kept_bytes == whole_bytes:
        return 0.0
    return _BLOCKS_AT_ONCE * used_bytes + (whole_bytes - kept_bytes if is_trained else 0.0)


def _computed_itemsize(node: fx.Node) -> int:
    """Bytes of an element in the dtype that a parameter is gathered in: that of a cast only where all read the same."""
    own: torch.dtype = node.meta["val"].dtype
    is_cast = all(user.target is aten._to_copy.default for user in node.users)
    read = {user.meta["val"].dtype for user in node.users} if is_cast else {own}
    narrow = read.pop() if len(read) == 1 else own
    return min(own.itemsize, narrow.itemsize) if narrow.is_floating_point else own.itemsize


def allowed_ways(
    free: Mapping[fx.Node, FreeParameter], rules: Sequence[PlanRule], axes: Sequence[PlanAxis]
) -> dict[fx.Node, FreeParameter]:
    """The parameters with the ways that rules leave them; one is not free for which rules want another than those."""
    found = {}
    for node, parameter in free.items():
        shape = tuple(node.meta["val"].shape)
        ways = parameter.ways
        is_ordered = False
        for axis, kind in itertools.product(axes, _kinds(shape)):
            said = rule_placement([rule for rule in rules if rule.kind == kind], parameter.name, shape, axis)
            if said is not None:
                ways = tuple(way for way in ways if _is_as_said(way, kind, said[0], axis.name))
                is_ordered = is_ordered or bool(said[1].order)
        if ways and not is_ordered:
            found[node] = dataclasses.replace(parameter, ways=ways)
    return found


def _kinds(shape: Sequence[int]) -> tuple[str, ...]:
    """Of rules that speak of a parameter: one number is stored whole, whatever they say."""
    return ("parameter", STORED) if len(shape) else ("parameter",)


def rule_against(
    way: Lying, name: str, shape: Sequence[int], rules: Sequence[PlanRule], axes: Sequence[PlanAxis]
) -> PlanRule | None:
    """The rule that wants a parameter to lie otherwise than this way; None where there is none."""
    for axis, kind in itertools.product(axes, _kinds(shape)):
        said = rule_placement([rule for rule in rules if rule.kind == kind], name, shape, axis)
        if said is not None and not _is_as_said(way, kind, said[0], axis.name):
            return said[1]
    return None


def _is_as_said(way: Lying, kind: str, said: Placement, axis: str) -> bool:
    if kind == "parameter":
        return way.computed == said
    if is_shard(way.computed) and axis not in way.stored:
        return way.computed == said or said.is_replicate()
    return way.stored.get(axis) == (dim_of(said) if is_shard(said) else None)
