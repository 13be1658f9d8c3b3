"""What a step hardly takes less than, whatever passes do with its order and launches: known before most have run."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from lightning_autoparallel.contracts import PartitionedGraph
from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.cost.streams import COMPUTE
from lightning_autoparallel.cost.timeline import use_of
from lightning_autoparallel.errors import ConfigError, UnsupportedOpError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.bucketing import BucketLimit

_WAYS = {"reduce_scatter": ("reduce_scatter", "all_to_all")}  # ranks may exchange what they reduce


def least_time_us(partitioned: PartitionedGraph, costs: CostModel, limit: BucketLimit) -> float:
    """Microseconds of the busiest stream or link of each graph, one after the other; 0 where a cost is unknown.

    Computing waits for nothing, and collectives share launches that are as large as ``limit`` allows: what is large by
    itself pays all of its latency, anything else the share that it has of such a launch. Chained gathers are fused
    already: that moves bytes to the group of another stream. The other passes mostly add calls; what is taken away is
    a percent or two, where a loss's head is computed in chunks, once.
    """
    try:
        return sum(_busiest_us(half.graph, costs, limit) for half in partitioned.graphs().values())
    except (UnsupportedOpError, ConfigError):
        return 0.0


def _busiest_us(graph: fx.Graph, costs: CostModel, limit: BucketLimit) -> float:
    busy_us: dict[str, float] = defaultdict(float)
    busy_us[COMPUTE] = sum(costs.graph_times_us(graph).values())
    shares = costs.link_shares(graph)
    for node in fxn.collectives_of(graph):
        group, kind = use = use_of(node)
        ways = _WAYS.get(kind, (kind,))
        busy_us[group] += min(_moving_us(node, way, costs) + _latency_us(node, way, costs, limit) for way in ways)
        for link, share in shares.get(use, {}).items():
            busy_us[link] += share * min(_moving_us(node, way, costs) for way in ways)
    return max(busy_us.values())


def _moving_us(node: fx.Node, kind: str, costs: CostModel) -> float:
    return costs.moving_time_us(kind, fxn.collective_size_bytes(node), fxn.group_of(node))


def _latency_us(node: fx.Node, kind: str, costs: CostModel, limit: BucketLimit) -> float:
    """Of a collective, as one of ``kind``, in a launch with others."""
    group, size_bytes = fxn.group_of(node), fxn.collective_size_bytes(node)
    latency_us = costs.launch_time_us(kind, size_bytes, group) - _moving_us(node, kind, costs)
    return latency_us * min(1.0, size_bytes / max(limit(kind, group), 1))
