"""What each node may compute with on one mesh axis, and what that costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.cost.placement import (
    PlacementRates,
    local_size_bytes,
    operator_time_us,
    redistribution_time_us,
)
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.plan import attention_rules, einsum_rule, views, vocabulary_rules, written_rules
from lightning_autoparallel.plan.rules import RULES, STRIDED_ALREADY, OpCall, Row, same, with_strides
from lightning_autoparallel.torch_compat.sharding import StridedShard, has_rule, is_plain, rule_rows, split_factor_of
from lightning_autoparallel.torch_compat.tracing import unset_fake_temporarily

_RULE_FILES = (
    attention_rules,
    einsum_rule,
    views,
    vocabulary_rules,
    written_rules,
)  # importing them registers their rules
# Torch's rules give partial sums on as if these were linear: they read bits, leave NaNs out, or take powers.
_NOT_LINEAR = {"aten.view.dtype", "aten.nansum.default", "aten.linalg__powsum.default"}  # not every torch has all


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to compute a node on one axis: a placement per output and per tensor argument, and its own time."""

    outputs: tuple[Placement | None, ...]
    inputs: tuple[Placement, ...]
    time_us: float


class CandidateTable:
    """The candidates of nodes on one axis, whose ranks are those of ``mesh``; equal calls share an entry.

    ``warn`` is told once per operator that has to compute replicated.
    """

    def __init__(self, axis: PlanAxis, mesh: DeviceMesh, rates: PlacementRates, warn: Callable[[str], None]) -> None:
        self._axis, self._mesh, self._rates, self._warn = axis, mesh, rates, warn
        self._size = axis.size
        self._cache: dict[Any, tuple[Candidate, ...]] = {}
        self._warned: set[Any] = set()

    def of(
        self, node: fx.Node, split_factors: tuple[int, ...], cut_already: tuple[int, ...] = ()
    ) -> tuple[Candidate, ...]:
        """The candidates of a call, the replicated one first.

        ``cut_already`` says into how many parts other axes have cut each output, then each tensor argument.
        """
        key = (_key(node, split_factors), cut_already)
        if key not in self._cache:
            self._cache[key] = self._make(node, split_factors, cut_already)
        return self._cache[key]

    def _make(
        self, node: fx.Node, split_factors: tuple[int, ...], cut_already: tuple[int, ...]
    ) -> tuple[Candidate, ...]:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
        inputs = tuple(argument.meta["val"] for argument in fxn.tensor_arguments(node))
        call = OpCall(
            op=node.target,
            args=tuple(args),
            kwargs=dict(kwargs),
            inputs=inputs,
            outputs=tuple(fxn.values(node)),
            split_factors=split_factors,
        )
        rows = [same(Replicate(), call), *self._rows(node, call)]
        kept = dict.fromkeys(row for row in rows if self._fits(row, call))
        before = cut_already or (1,) * (len(call.outputs) + len(call.inputs))
        return tuple(self._candidate(row, call, node.meta["val"], before) for row in kept)

    def _rows(self, node: fx.Node, call: OpCall) -> list[Row]:
        has_parts = bool(call.inputs) or isinstance(node.meta["val"], tuple)
        is_drawn = fxn.draws_mask(node) or (fxn.is_random(node) and has_parts)
        if is_drawn and not self._axis.shards_batch:
            return []  # its ranks draw alike: parts would be drawn alike too, and a backward's not as the whole was
        own = RULES[call.op](call) if call.op in RULES else None
        if own is not None:
            return own if call.op in STRIDED_ALREADY else with_strides(own, call.split_factors)
        if not has_rule(call.op):
            self._tell(node, "has no sharding rule")
            return []
        try:
            # Rules compute with real index tensors now and then; a fake mode around them makes those unreadable.
            with unset_fake_temporarily():
                rows = rule_rows(call.op, call.args, call.kwargs, len(call.outputs), self._mesh)
        except Exception as error:
            self._tell(node, f"has a sharding rule that fails ({type(error).__name__}: {error})")
            return []
        plain = [_without_nones(row, call) for row in rows if not _is_wrong(call.op, row)]
        can_be_sharded = any(out is not None and out.dim() for out in call.outputs)
        if can_be_sharded and not any(_matches(row, call) for row in plain):
            self._tell(node, "has a sharding rule that does not fit the call")
        return with_strides(plain, call.split_factors)

    def _tell(self, node: fx.Node, reason: str) -> None:
        if node.target not in self._warned:
            self._warned.add(node.target)
            where = fxn.module_path(node) or "the step itself"
            self._warn(
                f"{node.target} {reason}: it computes replicated on every rank, its inputs gathered "
                f"(in {where}, {fxn.describe(node)})"
            )

    def _fits(self, row: Row, call: OpCall) -> bool:
        return _matches(row, call) and all(self._divides(placement, tensor) for placement, tensor in _pairs(row, call))

    def _divides(self, placement: Placement | None, tensor: Tensor | None) -> bool:
        if placement is None or tensor is None:
            return True
        if not is_plain(placement) or (placement.is_partial() and tensor.dtype is torch.bool):
            return False  # addends of a truth value are none: true on several ranks would count as several
        if not isinstance(placement, (Shard, StridedShard)):
            return True
        if not 0 <= placement.dim < tensor.dim():
            return False
        size = tensor.shape[placement.dim]
        return size > 0 and size % (self._size * split_factor_of(placement)) == 0

    def _candidate(self, row: Row, call: OpCall, result: Any, before: tuple[int, ...]) -> Candidate:
        outputs, inputs = row
        mine = [self._shards(placement) for placement in (*outputs, *inputs)]
        shards = [count * other for count, other in zip(mine, before, strict=True)]
        time_us = operator_time_us(
            call.op,
            call.args,
            call.kwargs,
            result,
            local_size_bytes(_touched(call), shards),
            1 / (max(mine, default=1) * max(before, default=1)),
            self._rates,
        )
        time_us += self._inside_us(row, call, before)
        return Candidate(outputs=outputs, inputs=inputs, time_us=time_us)  # type: ignore[arg-type]

    def _inside_us(self, row: Row, call: OpCall, before: tuple[int, ...]) -> float:
        """Of all-reduces that the call is written out with."""
        if not call.inputs:
            return 0.0
        outputs, inputs = row
        launches, size_bytes = vocabulary_rules.reduced_inside(call.op, call.args, call.inputs[0], inputs[0])
        sent = size_bytes // before[len(outputs)]
        each_us = redistribution_time_us(Partial("sum"), Replicate(), sent, self._size, self._rates)
        return launches * each_us

    def _shards(self, placement: Placement | None) -> int:
        return self._size if isinstance(placement, (Shard, StridedShard)) else 1


def _touched(call: OpCall) -> list[Tensor | None]:
    """What a call reads and writes; a look-up reads rows of its table, as many as it writes."""
    if call.op is torch.ops.aten.embedding.default:
        return [*call.outputs, None, *call.inputs[1:]]
    return [*call.outputs, *call.inputs]


def _key(node: fx.Node, split_factors: tuple[int, ...]) -> Any:
    def freeze(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            value = argument.meta["val"]
            return (tuple(value.shape), tuple(value.stride()), value.dtype) if isinstance(value, Tensor) else str(value)
        if isinstance(argument, (list, tuple)):
            return tuple(freeze(item) for item in argument)
        if isinstance(argument, dict):
            return tuple((name, freeze(item)) for name, item in argument.items())
        return argument if isinstance(argument, (int, float, bool, str, torch.dtype)) else str(argument)

    return node.target, freeze(node.args), freeze(dict(node.kwargs)), split_factors


def _is_wrong(op: Any, row: Row) -> bool:
    """Whether a row of torch's says of an operator that it is linear, which is not."""
    return str(op) in _NOT_LINEAR and any(placement is not None and placement.is_partial() for placement in row[1])


def _pairs(row: Row, call: OpCall) -> list[tuple[Placement | None, Tensor | None]]:
    outputs, inputs = row
    return [*zip(outputs, call.outputs, strict=True), *zip(inputs, call.inputs, strict=True)]


def _matches(row: Row, call: OpCall) -> bool:
    """Whether the row speaks of the call's tensors: as many, and none where there is none."""
    outputs, inputs = row
    if len(inputs) != len(call.inputs) or len(outputs) != len(call.outputs):
        return False
    return all((placement is None) == (tensor is None) for placement, tensor in _pairs(row, call))


def _without_nones(row: Row, call: OpCall) -> Row:
    """Rules list absent optional inputs as None; absent outputs are told from the call.

    A result that a rule leaves out is bookkeeping of the rank (the random state of fused attention): it has no parts.
    """
    outputs, inputs = row
    pairs = zip(outputs, call.outputs, strict=False)
    outputs = tuple(None if out is None else placement or Replicate() for placement, out in pairs)
    return outputs, tuple(placement for placement in inputs if placement is not None)
