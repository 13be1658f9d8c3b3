"""One collective for a bucket: members laid side by side, launched once, taken apart again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.calls import FakeResults
from lightning_autoparallel.passes.bucketing.choose import common_path
from lightning_autoparallel.passes.bucketing.moves import hoist, sink
from lightning_autoparallel.torch_compat import collectives

aten = torch.ops.aten

_CONTIGUOUS = torch.contiguous_format
_SMALL = 64  # a member is small if it is at most this fraction of its bucket


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

    # -- gathers: launched with the first of them, each taken out of the result where it was waited for ----------------

    def _gather(self, members: list[fx.Node], shared: dict[str, Any]) -> None:
        # The widest first, so that each part begins at a multiple of its elements' size.
        ordered = sorted(members, key=lambda member: -_value(member).element_size())
        gathered = self._launch_gather(members[0], ordered, shared)
        earliest = min(user for member in members for user in member.users)
        call = self._caller(earliest, shared, tagged=False)
        whole = call(collectives.WAIT, gathered)
        ranks, begin_bytes, rows = members[0].args[1], 0, {}
        assert isinstance(ranks, int)
        for member in ordered:
            dtype, size_bytes = _value(member).dtype, fxn.size_bytes(_value(_operand(member)))
            if dtype not in rows:
                flat = whole if dtype == _value(whole).dtype else call(aten.view.dtype, whole, dtype)
                rows[dtype] = call(aten.view.default, flat, [ranks, _value(flat).numel() // ranks])
            # Small ones are taken out at once: waiting for their use they would keep all of the bucket in memory.
            is_small = size_bytes * ranks * _SMALL <= fxn.size_bytes(_value(whole))
            anchor = earliest if is_small else min(member.users)
            itemsize = _value(member).element_size()
            self._take_out(member, anchor, rows[dtype], begin_bytes // itemsize, (begin_bytes + size_bytes) // itemsize)
            begin_bytes += size_bytes
        self._erase(members)

    def _launch_gather(self, first: fx.Node, ordered: list[fx.Node], shared: dict[str, Any]) -> fx.Node:
        """One gather in place of ``first``, of all shards one after another; as bytes where they differ in dtype."""
        for member in ordered:
            hoist(_operand(member), first)
        call = self._caller(first, shared)
        as_bytes = len({_value(member).dtype for member in ordered}) > 1
        joined = call(aten.cat.default, [_flat(call, _operand(member), as_bytes) for member in ordered])
        missing = -_value(joined).numel() % _value(ordered[0]).element_size() if as_bytes else 0
        if missing:
            joined = call(aten.constant_pad_nd.default, joined, [0, missing])
        return call(collectives.ALL_GATHER, joined, *first.args[1:])

    def _take_out(self, member: fx.Node, anchor: fx.Node, rows: fx.Node, begin: int, end: int) -> None:
        """Columns ``begin`` to ``end`` of every rank's row, copied together before ``anchor``: what ``member`` gave.

        Made where a value is first used, so that of the bucket's members one at a time exists twice.
        """
        wait = min(member.users)
        call = self._caller(anchor, wait.meta)
        part = call(aten.clone.default, call(aten.slice.Tensor, rows, 1, begin, end), memory_format=_CONTIGUOUS)
        whole = call(aten.view.default, part, list(_value(wait).shape))
        for user in list(member.users):
            user.replace_all_uses_with(whole)

    # -- reductions: launched with the last of them, what follows each of them moves behind ----------------------------

    def _reduce(self, members: list[fx.Node], shared: dict[str, Any]) -> None:
        last, behind = members[-1], members[-1].next
        _, reduce_op, *rest = last.args
        call = self._caller(last, shared)
        if rest[:-1]:  # (ranks, part): what goes to each rank lies together
            ranks = rest[0]
            assert isinstance(ranks, int)
            rows = [
                call(aten.view.default, _operand(m), [ranks, _value(_operand(m)).numel() // ranks]) for m in members
            ]
            joined = call(aten.cat.default, rows, 1)
            joined = call(aten.view.default, joined, [_value(joined).numel()])
        else:
            joined = call(aten.cat.default, [_flat(call, _operand(member)) for member in members])
        reduced = call(last.target, joined, reduce_op, *rest)
        call = self._caller(last, shared, tagged=False)
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
            for wait in list(member.users):
                self._graph.erase_node(wait)
            self._graph.erase_node(member)

    def _caller(self, anchor: fx.Node, meta: dict[str, Any], *, tagged: bool = True) -> Callable[..., fx.Node]:
        """A function that adds calls right before ``anchor``, of the same place in the user's code as ``meta``."""
        left_out = {"val", "tensor_meta", "original_aten"} | (set() if tagged else {"collective_role"})
        kept = {key: value for key, value in meta.items() if key not in left_out}

        def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            with self._graph.inserting_before(anchor):
                node = self._graph.call_function(target, args, kwargs)
            node.meta = {**kept, "val": self._results.of(target, args, kwargs)}
            return node

        return call


def _value(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _operand(collective: fx.Node) -> fx.Node:
    operand = collective.args[0]
    assert isinstance(operand, fx.Node)
    return operand


def _flat(call: Callable[..., fx.Node], node: fx.Node, as_bytes: bool = False) -> fx.Node:
    """One row of the node's elements, or of their bytes; collectives are given contiguous values."""
    if _value(node).dim() != 1:
        node = call(aten.view.default, node, [_value(node).numel()])
    return call(aten.view.dtype, node, torch.uint8) if as_bytes and _value(node).dtype != torch.uint8 else node
