"""Which calls run as one kernel with their neighbours, and so which bytes go through memory.

A compiler fuses pointwise operators, reductions and what generates tensors; a sum over nodes of what each reads and
writes would count every value in between. The model, in place of a compiler's search:

- A call is *free* (a view, an empty tensor, a wait), *fused*, a *kernel* of its own (a matrix product, attention, a
  sort) or a *collective*.
- A value between two fused calls stays in registers if no kernel, collective or large reduction lies on any way
  between them. That is decided by *levels*, the largest number of those on a way from the inputs, so that the order of
  calls does not matter; on one level, nothing can lie in between.
- A fused call writes its result if anything else needs it. What several fused calls of one level read is read once.
- What is made of no tensor (a range, a constant) is made again where fused calls need it.
- A fused call that only a concatenation reads writes its part of the concatenation where that lies: parts computed at
  different times are not copied (torch/_inductor/ir.py, ``ConcatKernel``).
- A reduction over more than ``_LONGEST_ROW_BYTES`` ends its kernel: its input does not fit where it could be read
  twice.

Inductor may fuse less (other iteration spaces, too many inputs) or more (into the epilogue of a matrix product).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, fx

from lightning_autoparallel.cost.operators import FREE, FUSED, LOOKUPS, REDUCTIONS
from lightning_autoparallel.errors import UnsupportedOpError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat.rank_operators import NAMESPACE
from lightning_autoparallel.torch_compat.schemas import named_arguments

CallKind = Literal["free", "fused", "kernel", "collective"]

# Operators of other namespaces (a user's own, a library's) may compute anything.
_KNOWN_NAMESPACES = {"aten", "prims", "inductor", "bucketing", "fsdp", NAMESPACE}
_LONGEST_ROW_BYTES = 2**16  # a block's registers and shared memory hold about this much


def call_kind(node: fx.Node) -> CallKind:
    """What a node is to the compiler.

    Raises:
        UnsupportedOpError: an operator that nothing is known of, or one without a fake value.
    """
    if node.op in ("placeholder", "output", "get_attr"):
        return "free"
    if fxn.collective_kind(node):
        return "collective"
    if fxn.is_wait(node) or fxn.is_getitem(node):
        return "free"
    _check_known(node)
    if not any(isinstance(value, Tensor) for value in fxn.values(node)):
        return "free"  # sizes, and what checks values: nothing moves
    name = _packet_name(node.target)
    if name in FREE:
        return "free"
    tags = getattr(node.target, "tags", ())
    fused = torch.Tag.pointwise in tags or name in FUSED
    return "fused" if fused else "kernel"


def graph_kinds(graph: fx.Graph) -> dict[fx.Node, CallKind]:
    """What each node of the graph is to the compiler.

    Raises:
        UnsupportedOpError: a call that nothing is known of.
    """
    return {node: call_kind(node) for node in graph.nodes}


def graph_traffic(graph: fx.Graph, kinds: Mapping[fx.Node, CallKind]) -> dict[fx.Node, int]:
    """Bytes that each call of the graph, whose ``kinds`` are known, reads from memory and writes to it."""
    levels = _levels(graph, kinds)
    traffic = _Traffic(kinds.__getitem__, lambda producer, reader: levels[producer] == levels[reader])
    return {node: traffic.size_bytes(node, levels[node]) for node in graph.nodes}


def node_traffic(node: fx.Node) -> int:
    """Bytes that a call reads and writes, judged by its neighbours alone: all fused ones are taken to be of its level.

    Raises:
        UnsupportedOpError: nothing is known of the call, or of a neighbour.
    """
    return _Traffic(call_kind, lambda producer, consumer: not _ends_kernel(producer, "fused")).size_bytes(node, 0)


def is_looked_up(argument: fx.Node, reader: fx.Node) -> bool:
    """Whether of ``argument`` only what ``reader`` looks up is read: as many bytes as it writes, or all if less."""
    return _packet_name(reader.target) in LOOKUPS and argument is reader.args[0]


def _levels(graph: fx.Graph, kinds: Mapping[fx.Node, CallKind]) -> dict[fx.Node, int]:
    levels: dict[fx.Node, int] = {}
    after: dict[fx.Node, int] = {}  # the level of what reads it
    for node in graph.nodes:
        levels[node] = max((after[argument] for argument in node.all_input_nodes), default=0)
        after[node] = levels[node] + _ends_kernel(node, kinds[node])
    return levels


def _ends_kernel(node: fx.Node, kind: CallKind) -> bool:
    if kind != "fused":
        return kind in ("kernel", "collective")
    row_bytes = _reduced_row_bytes(node)
    return row_bytes > _LONGEST_ROW_BYTES


def _reduced_row_bytes(node: fx.Node) -> int:
    """Bytes of the input that are read for one row of the output, or one element; 0 for what is no reduction."""
    if not _is_reduction(node):
        return 0
    read, written = fxn.values(node.all_input_nodes[0])[0], fxn.values(node)[0]
    if read is None or written is None:
        return 0
    return read.numel() // max(_rows(node, read, written), 1) * read.element_size()


def _rows(node: fx.Node, read: Tensor, written: Tensor) -> int:
    """How many rows of ``read`` a reduction takes apart from each other."""
    arguments = named_arguments(node.target, node.args, node.kwargs)
    if _packet_name(node.target).startswith("native_"):  # norms give the means of rows, or are given them backward
        means = fxn.values(arguments.get("mean", node))[-1]
        return means.numel() if means is not None else 1
    if isinstance(arguments.get("dim"), int) and read.dim():  # a softmax has results of all of the row
        return read.numel() // max(int(read.shape[arguments["dim"]]), 1)
    return written.numel()


def _is_reduction(node: fx.Node) -> bool:
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return _packet_name(node.target) in REDUCTIONS and not is_pointwise and bool(node.all_input_nodes)


class _Traffic:
    """Bytes of calls, where ``joined`` says whether a fused producer and a fused reader are one kernel."""

    def __init__(self, kind: Callable[[fx.Node], CallKind], joined: Callable[[fx.Node, fx.Node], bool]) -> None:
        self._kind, self._joined = kind, joined
        self._read: set[tuple[fx.Node, int]] = set()
        self._size_of, self._source_of = cache(_size_bytes), cache(_source)

    def size_bytes(self, node: fx.Node, level: int) -> int:
        kind = self._kind(node)
        if kind in ("free", "collective"):
            return 0
        read = sum(self._argument_bytes(argument, node, kind, level) for argument in node.all_input_nodes)
        written = self._is_written(node) if kind == "fused" else True
        laid = sum(self._size_of(argument) for argument in node.all_input_nodes if self._is_laid_into(argument, node))
        return read + (self._size_of(node) - laid if written else 0)

    def _argument_bytes(self, argument: fx.Node, reader: fx.Node, kind: CallKind, level: int) -> int:
        source = self._source_of(argument)
        if kind == "fused":
            if self._kind(source) == "fused" and self._are_one(source, reader):
                return 0
            if self._is_laid_into(argument, reader):
                return 0
            if (argument, level) in self._read:
                return 0
            self._read.add((argument, level))
        size = min(self._size_of(argument), self._size_of(source))
        return min(size, self._size_of(reader)) if is_looked_up(argument, reader) else size

    def _are_one(self, producer: fx.Node, reader: fx.Node) -> bool:
        return not producer.all_input_nodes or self._joined(producer, reader)

    def _is_laid_into(self, part: fx.Node, reader: fx.Node) -> bool:
        """Whether a concatenation's part was written into it by the call that computed it, another kernel."""
        if _packet_name(reader.target) != "cat":
            return False
        source = self._source_of(part)
        if self._kind(source) != "fused" or self._are_one(source, reader):
            return False
        if self._size_of(source) != self._size_of(part):
            return False
        return set(_readers(source)) == {reader}

    def _is_written(self, node: fx.Node) -> bool:
        readers = list(_readers(node))
        return any(self._kind(reader) != "fused" or not self._are_one(node, reader) for reader in readers)


def _source(node: fx.Node) -> fx.Node:
    """The call whose result is seen through views and choices of one of several results."""
    while _is_seen_through(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _is_seen_through(node: fx.Node) -> bool:
    return node.op == "call_function" and (fxn.is_getitem(node) or _packet_name(node.target) in FREE)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if _is_seen_through(user):
            yield from _readers(user)
        else:
            yield user


def _size_bytes(node: fx.Node) -> int:
    if node.op == "output":
        return 0
    return sum(fxn.size_bytes(value) for value in fxn.values(node) if value is not None)


@cache
def _packet_name(target: Any) -> str:
    """``mul`` of ``aten.mul.Tensor``."""
    return str(getattr(target, "overloadpacket", target)).rpartition(".")[2]


def _check_known(node: fx.Node) -> None:
    namespace = getattr(node.target, "namespace", None)
    if namespace not in _KNOWN_NAMESPACES:
        raise UnsupportedOpError(
            f"{fxn.describe(node)} calls {node.target}, whose time cannot be predicted: only torch's own operators "
            "have a cost; write it with those, or do without predicted times"
        )
    if "val" not in node.meta:
        raise UnsupportedOpError(
            f"{fxn.describe(node)} has no fake value: the time of {node.target} depends on its shapes"
        )
