"""The only ``is_all_gather``, ``is_wait``, ``group_of``, ``is_backward`` ... of the package."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from lightning_autoparallel.contracts import CollectiveCount
from lightning_autoparallel.torch_compat import collectives, rank_operators
from lightning_autoparallel.torch_compat.dispatch import is_random as is_random_operator
from lightning_autoparallel.torch_compat.schemas import named_arguments

aten = torch.ops.aten

_KINDS = {
    collectives.ALL_GATHER: "all_gather",
    collectives.ALL_GATHER_SEVERAL: "all_gather",
    collectives.REDUCE_SCATTER: "reduce_scatter",
    collectives.ALL_REDUCE: "all_reduce",
    collectives.ALL_TO_ALL: "all_to_all",
    collectives.BROADCAST: "broadcast",
    rank_operators.SHARD_PERMUTE: "permute",
}
# An operator's own hash is computed in Python, and this is asked of every call again and again.
_KIND_BY_ID = {id(target): kind for target, kind in _KINDS.items()}

# Views that show all of their input: computing one again costs nothing and keeps no more memory alive.
_VIEWS_OF_ALL = {
    aten.view.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
}
VIEWS = _VIEWS_OF_ALL | {
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.view.dtype,
}

PARAMETER_GATHER = "parameter_gather"
TERMINAL_REDUCTION = "terminal_reduction"


def is_view_of_all(node: fx.Node) -> bool:
    """Whether the node shows all of its input in another shape or order, without computing."""
    return node.target in _VIEWS_OF_ALL


def collective_kind(node: fx.Node) -> str | None:
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast``, ``permute``, or None."""
    return _KIND_BY_ID.get(id(node.target))


def collective_role(node: fx.Node) -> str | None:
    """``parameter_gather`` or ``terminal_reduction``, as the pass ``tag_collectives`` found; None for any other."""
    return node.meta.get("collective_role")


def rank_axis(node: fx.Node) -> str | None:
    """The axis on which this rank's place is in the call's numbers, where one was said to be."""
    return node.meta.get("rank_axis")


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for a collective."""
    return node.target is collectives.WAIT


def waits_of(collective: fx.Node) -> list[fx.Node]:
    """The waits for a collective's result, or for its results where it has several."""
    results = [user for user in collective.users if is_getitem(user)] or [collective]
    return [user for result in results for user in result.users if is_wait(user)]


def waited_collective(wait: fx.Node) -> fx.Node | None:
    """The collective whose result, or a view of it, is waited for; None where the tensor is no collective's."""
    node = wait
    while node is wait or node.target in VIEWS or is_getitem(node):
        (node, *_) = node.all_input_nodes
    return node if collective_kind(node) else None


def group_of(node: fx.Node) -> str:
    """The process group name of a collective: always its last argument."""
    return str(node.args[-1])


def is_random(node: fx.Node) -> bool:
    """Whether running the node twice gives two results."""
    if is_attention(node):
        return draws_mask(node) and "_backward" not in str(node.target)
    return _draws(node.target)


@cache
def _draws(target: Any) -> bool:
    return hasattr(target, "tags") and is_random_operator(target)


def draws_mask(node: fx.Node) -> bool:
    """Whether the node is fused attention with dropout: forward it draws a mask, backward that again from its seed."""
    return is_attention(node) and bool(named_arguments(node.target, node.args, node.kwargs).get("dropout_p"))


def is_attention(node: fx.Node) -> bool:
    """Whether the node is fused attention, forward or backward."""
    return is_attention_target(node.target)


@cache  # spelling an operator out takes longer than anything else that is asked of every node
def is_attention_target(target: Any) -> bool:
    """Whether the operator is fused attention, forward or backward."""
    return str(target).startswith("aten._scaled_dot_product_")


def is_getitem(node: fx.Node) -> bool:
    """Whether the node picks one result of a multi-output operator."""
    return node.target is operator.getitem


def is_backward(node: fx.Node) -> bool:
    """Whether the node was traced while autograd ran backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def is_early(node: fx.Node) -> bool:
    """Whether the node, which only the backward reads, is computed by the forward, for it to keep nothing larger."""
    return bool(node.meta.get("computed_early"))


def custom(node: fx.Node, key: str) -> Any:
    """An annotation made during capture (``module``, ``source``, ``checkpoint_region``), or None."""
    return (node.meta.get("custom") or {}).get(key)


def module_path(node: fx.Node) -> str | None:
    """The path of the module whose code a node is of; None where capture knows none."""
    path = custom(node, "module")
    return None if path is None else str(path)


def block_of(path: str) -> str | None:
    """The repeated module that a path lies in, ``layers.3`` for ``layers.3.norm``; None if it lies in none."""
    parts = path.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return None if first is None else ".".join(parts[: first + 1])


def kind_of(path: str) -> str:
    """``layers.*.norm`` for ``layers.3.norm``: modules whose paths differ in numbers only are of one kind."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def call_of(node: fx.Node) -> str:
    """``aten.mul.Tensor (model.py:88)``: the operator and the user's line, alike in all blocks of a model."""
    source = custom(node, "source")
    return f"{node.target} ({source})" if source else str(node.target)


def edge_of(node: fx.Node) -> str | None:
    """``outputs:layers.0.attention``: the edge of a module that capture has marked with this node, or None."""
    return custom(node, "edge") if node.target is aten.alias.default else None


def describe(node: fx.Node) -> str:
    """``mul_7 (model.py:88)``: the node and the user's line, as errors name it."""
    source = custom(node, "source")
    return f"{node.name} ({source})" if source else node.name


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """The node's tensor arguments in the order of its call, repeated ones repeated."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda argument: found.append(argument))
    return found


def with_ancestors(nodes: Iterable[fx.Node], among: Callable[[fx.Node], bool] | None = None) -> set[fx.Node]:
    """The nodes and all that they are computed from; the walk does not pass what is not ``among`` those of interest."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found and (among is None or among(node)):
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def parameter_of(calls: Iterable[fx.Node], parameters: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For the parameters, and every call among ``calls`` that depends on one of them and nothing else, which it is."""
    origin = {node: node for node in parameters}
    for node in calls:
        sources = {origin.get(argument) for argument in node.all_input_nodes}
        if len(sources) == 1 and (source := sources.pop()) is not None:
            origin[node] = source
    return origin


def values(node: fx.Node) -> list[Tensor | None]:
    """The fake tensors a node results in; non-tensors are None."""
    value = node.meta.get("val")
    items = list(value) if isinstance(value, (tuple, list)) else [value]
    return [item if isinstance(item, Tensor) else None for item in items]


def size_bytes(tensor: Tensor) -> int:
    """Bytes of a dense tensor of this shape and dtype."""
    return math.prod(tensor.shape) * tensor.element_size()


def collective_size_bytes(node: fx.Node) -> int:
    """Bytes per rank of the larger side of a collective: the gathered, or the not yet scattered, tensors."""
    sent = [value for operand in node.all_input_nodes for value in values(operand)]
    return max(sum(size_bytes(value) for value in side if value is not None) for side in (values(node), sent))


def collectives_of(graph: fx.Graph) -> Iterator[fx.Node]:
    """The graph's collectives in order."""
    return (node for node in graph.nodes if node.op == "call_function" and collective_kind(node))


def count_collectives(graph: fx.Graph, axes_by_group: Mapping[str, str]) -> dict[str, dict[str, CollectiveCount]]:
    """Launches and bytes of a graph by kind and mesh axes; the axes of an unknown group are its name."""
    return tabulate_collectives(collectives_of(graph), axes_by_group)


def tabulate_collectives(
    nodes: Iterable[fx.Node], axes_by_group: Mapping[str, str]
) -> dict[str, dict[str, CollectiveCount]]:
    """Launches and bytes of these collectives by kind and mesh axes."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for node in nodes:
        sizes.setdefault((collective_kind(node) or "", group_of(node)), []).append(collective_size_bytes(node))
    table: dict[str, dict[str, CollectiveCount]] = {}
    for (kind, group), found in sizes.items():
        per_axes = table.setdefault(kind, {})
        axes = axes_by_group.get(group, group)
        per_axes[axes] = per_axes.get(axes, CollectiveCount()) + CollectiveCount(
            count=len(found), size_bytes=sum(found)
        )
    return table
