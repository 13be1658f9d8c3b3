"""What computing a head in chunks costs: its calls by themselves, whole and in chunks."""

from __future__ import annotations

from torch import fx

from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.added_calls import Calls, results_beside
from lightning_autoparallel.passes.decompose.product_parts import product_of
from lightning_autoparallel.passes.loss_head.head_region import HeadRegion, find_region
from lightning_autoparallel.passes.loss_head.write_chunks import write_chunks


def extra_time_us(region: HeadRegion, costs: CostModel) -> float:
    """Microseconds more than whole; reductions between its calls are taken to wait for each other.

    Raises:
        UnsupportedOpError: nothing is known of an operator or a process group.
        NotChunkable: by itself it is another region.
    """
    alone, product = _alone(region)
    whole_us = _time_us(alone, costs)
    again = find_region(alone, product, region.chunks)
    output = alone.output_node()
    parts = write_chunks(again, {}, Calls(output, {}, results_beside(product)))
    output.args = (list(parts.values()),)
    for node in reversed(again.calls):
        alone.erase_node(node)
    return _time_us(alone, costs) - whole_us


def products_time_us(graph: fx.Graph, costs: CostModel) -> float:
    """Microseconds of all products of a graph: less than its step takes.

    Raises:
        ConfigError: the hardware has no peak for the dtype of one.
    """
    return sum(costs.node_time_us(node) for node in graph.nodes if product_of(node) is not None)


def _alone(region: HeadRegion) -> tuple[fx.Graph, fx.Node]:
    """A graph of the region's calls, which gives what they give, and the product in it."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in region.entries():
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in region.calls:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output([env[node] for node in region.exits()])
    return graph, env[region.product]


def _time_us(graph: fx.Graph, costs: CostModel) -> float:
    times_us = costs.all_times_us(graph)
    return sum(times_us[node] for node in graph.nodes if node in times_us and not fxn.is_wait(node))
