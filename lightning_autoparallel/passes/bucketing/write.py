"""One collective for a bucket: of a list of tensors where they are gathered, side by side where they are reduced."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.added_calls import Calls, FakeResults
from lightning_autoparallel.passes.bucketing.casts import COPIES_AND_VIEWS, without_casts
from lightning_autoparallel.passes.bucketing.choose import common_path
from lightning_autoparallel.passes.bucketing.moves import hoist, sink
from lightning_autoparallel.torch_compat import collectives

aten = torch.ops.aten


class BucketWriter:
    """Replaces the members of buckets in one graph; equal calls are evaluated once."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._results = FakeResults()

    def write(self, members: Sequence[fx.Node]) -> None:
        """Replace ``members`` by one collective. None may depend on another, nor on what replaces other buckets."""
        members = sorted(members)  # nodes compare by their place in the graph
        shared = dict(members[0].meta)
        path = common_path(path for member in members if (path := fxn.module_path(member)) is not None)
        shared["custom"] = {**(shared.get("custom") or {}), "module": path}
        if fxn.collective_kind(members[0]) == "all_gather":
            self._gather(members, shared)
        else:
            self._reduce(members, shared)

    # -- gathers: launched with the first of them, each waited for where it was ----------------------------------------

    def _gather(self, members: list[fx.Node], shared: dict[str, Any]) -> None:
        """One launch of several tensors: nothing is copied, and each is freed by itself.

        Backends know a list of tensors: NCCL makes one kernel of a group of calls ("Group Calls", NCCL's user guide).
        """
        first = members[0]
        for member in members:
            hoist(_operand(member), first)
        # Gloo converts a list to the first one's dtype, and takes no complex ones; bytes are moved as they are.
        dtypes = {_value(member).dtype for member in members}
        as_bytes = len(dtypes) > 1 or any(dtype.is_complex for dtype in dtypes)
        start = self._caller(first, shared)
        operands = [_operand(member) for member in members]
        sent = [start(aten.view.dtype, operand, torch.uint8) if as_bytes else operand for operand in operands]
        gathered = self._launch(first, shared, collectives.ALL_GATHER_SEVERAL, sent, *first.args[1:])
        for position, member in enumerate(members):
            item = self._caller(first, member.meta)(operator.getitem, gathered, position)
            for wait in list(member.users):
                call = self._caller(wait, wait.meta)
                whole = call(collectives.WAIT, item)
                whole = call(aten.view.dtype, whole, _value(member).dtype) if as_bytes else whole
                wait.replace_all_uses_with(whole)
        self._erase(members)

    # -- reductions: launched with the last of them, what follows each of them moves behind ----------------------------

    def _reduce(self, members: list[fx.Node], shared: dict[str, Any]) -> None:
        last, behind = members[-1], members[-1].next
        _, reduce_op, *rest = last.args
        call = self._caller(last, shared)
        operands = without_casts([_operand(member) for member in members], call)
        if rest[:-1]:  # (ranks, part): what goes to each rank lies together
            ranks = rest[0]
            assert isinstance(ranks, int)
            rows = [call(aten.view.default, part, [ranks, _value(part).numel() // ranks]) for part in operands]
            joined = call(aten.cat.default, rows, 1)
            joined = call(aten.view.default, joined, [_value(joined).numel()])
        else:
            joined = call(aten.cat.default, [_flat(call, part) for part in operands])
        reduced = self._launch(last, shared, last.target, joined, reduce_op, *rest)
        whole = call(collectives.WAIT, reduced)
        begin = 0
        for member in members:
            shape = list(_value(member).shape)
            part = call(aten.slice.Tensor, whole, 0, begin, begin + math.prod(shape))
            result = call(aten.view.default, part, shape)
            begin += math.prod(shape)
            for wait in list(member.users):
                sink(wait.users, behind)
                wait.replace_all_uses_with(result)
        self._erase(members)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _erase(self, members: list[fx.Node]) -> None:
        for member in members:
            operand = _operand(member)
            for wait in list(member.users):
                self._graph.erase_node(wait)
            self._graph.erase_node(member)
            self._erase_unread(operand)

    def _erase_unread(self, node: fx.Node) -> None:
        """Remove what only a member read: a cast that the bucket does without."""
        while not node.users and node.target in COPIES_AND_VIEWS:
            (source,) = node.all_input_nodes
            self._graph.erase_node(node)
            node = source

    def _caller(self, anchor: fx.Node, meta: dict[str, Any]) -> Calls:
        """Adds calls right before ``anchor``, of the same place in the user's code as ``meta``."""
        return Calls(anchor, meta, self._results)

    def _launch(self, anchor: fx.Node, shared: dict[str, Any], target: Any, *args: Any) -> fx.Node:
        """The collective of a bucket, tagged as its members were."""
        node = self._caller(anchor, shared)(target, *args)
        node.meta["collective_role"] = shared["collective_role"]
        return node


def _value(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _operand(collective: fx.Node) -> fx.Node:
    operand = collective.args[0]
    assert isinstance(operand, fx.Node)
    return operand


def _flat(call: Calls, node: fx.Node) -> fx.Node:
    """One row of the node's elements; collectives are given contiguous values."""
    return node if _value(node).dim() == 1 else call(aten.view.default, node, [_value(node).numel()])
