"""What a scheduler has to know of a graph's calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.cost.flops import counts_flops
from lightning_autoparallel.cost.hardware import HardwareSpec
from lightning_autoparallel.cost.traffic import Sending
from lightning_autoparallel.fx import nodes as fxn


@dataclass(frozen=True, kw_only=True)
class Calls:
    """The nodes of a graph in their present order, the output apart.

    ``times_us`` are microseconds on the stream that each runs on. ``needs`` are the nodes that must come before,
    ``heavy`` matrix products and attention. ``leading`` are calls that a collective other than a gradient's reduction
    depends on: what is not leading may run late. ``feeding`` only makes what parameters are gathered from. ``sendings``
    are the collectives, with what they ask of links.
    """

    nodes: tuple[fx.Node, ...]
    place: Mapping[fx.Node, int]
    times_us: Mapping[fx.Node, float]
    needs: Mapping[fx.Node, tuple[fx.Node, ...]]
    heavy: frozenset[fx.Node]
    heavy_before: tuple[int, ...]  # by place
    leading: frozenset[fx.Node]
    feeding: frozenset[fx.Node]
    sendings: Mapping[fx.Node, Sending]
    hardware: HardwareSpec


def read_calls(graph: fx.Graph, costs: CostModel, times_us: Mapping[fx.Node, float]) -> Calls:
    """The facts of ``graph``, whose calls take ``times_us`` on the stream that each runs on."""
    nodes = tuple(node for node in graph.nodes if node.op != "output")
    heavy = frozenset(filter(is_heavy, nodes))
    return Calls(
        nodes=nodes,
        place={node: index for index, node in enumerate(nodes)},
        times_us=times_us,
        needs=_needs(nodes),
        heavy=heavy,
        heavy_before=tuple(accumulate((node in heavy for node in nodes), initial=0)),
        leading=_leading(nodes),
        feeding=_feeding(nodes),
        sendings=costs.sendings(graph, times_us),
        hardware=costs.hardware,
    )


def is_heavy(node: fx.Node) -> bool:
    """Whether the call is a matrix product, a convolution or attention."""
    return node.op == "call_function" and counts_flops(node)


def is_urgent(node: fx.Node) -> bool:
    """Whether the call starts a collective between others: not a parameter's gather, nor a gradient's reduction."""
    return fxn.collective_kind(node) is not None and fxn.collective_role(node) is None


def changes_inputs(node: fx.Node) -> bool:
    """Whether the call writes to one of its arguments, so that readers may not pass it."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and bool(schema is not None and schema.is_mutable)


def _needs(nodes: tuple[fx.Node, ...]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Arguments; random calls keep their order, since each draws what the one before left."""
    needs: dict[fx.Node, tuple[fx.Node, ...]] = {}
    last: fx.Node | None = None
    for node in nodes:
        needs[node] = tuple(node.all_input_nodes)
        if fxn.is_random(node):
            if last is not None and last not in needs[node]:
                needs[node] += (last,)
            last = node
    return needs


def _leading(nodes: tuple[fx.Node, ...]) -> frozenset[fx.Node]:
    leading: set[fx.Node] = set()
    for node in reversed(nodes):
        if is_urgent(node) or any(user in leading for user in node.users):
            leading.add(node)
    return frozenset(leading)


def _feeding(nodes: tuple[fx.Node, ...]) -> frozenset[fx.Node]:
    feeding: set[fx.Node] = set()
    for node in reversed(nodes):
        is_gather = fxn.collective_role(node) == fxn.PARAMETER_GATHER
        if is_gather or (node.users and node.op == "call_function" and all(user in feeding for user in node.users)):
            feeding.add(node)
    return frozenset(feeding)
