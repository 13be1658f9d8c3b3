"""``CostModel``: hardware and process groups, to which passes and reports are bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from lightning_autoparallel.cost.collective import collective_time_us, moving_time_us, saturating_bytes
from lightning_autoparallel.cost.compute import graph_times_us, node_time_us
from lightning_autoparallel.cost.groups import GroupShape
from lightning_autoparallel.cost.hardware import HardwareSpec
from lightning_autoparallel.cost.timeline import (
    Timeline,
    link_uses,
    node_collective_time_us,
    predict_timeline,
    sendings_of,
)
from lightning_autoparallel.cost.traffic import Sending, Shares, shared_links
from lightning_autoparallel.errors import UnsupportedOpError
from lightning_autoparallel.fx import nodes as fxn


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Predicted times on some hardware; ``groups`` maps process group names to shapes (``cost.groups.mesh_groups``).

    All ranks of a job must be given equal ones: what passes decide by them must be decided alike.
    """

    hardware: HardwareSpec
    groups: Mapping[str, GroupShape]

    def node_time_us(self, node: fx.Node) -> float:
        """Microseconds of one call on the compute stream, by itself; 0 for views, waits and collectives.

        Raises:
            UnsupportedOpError: nothing is known of the operator.
        """
        return node_time_us(node, self.hardware)

    def graph_times_us(self, graph: fx.Graph) -> dict[fx.Node, float]:
        """Microseconds of every call of a graph on the compute stream, fusion judged over the whole graph.

        Raises:
            UnsupportedOpError: nothing is known of an operator.
        """
        return graph_times_us(graph, self.hardware)

    def all_times_us(self, graph: fx.Graph) -> dict[fx.Node, float]:
        """Microseconds of every call of a graph on the stream that it runs on: collectives on their groups'.

        Raises:
            UnsupportedOpError: nothing is known of an operator, a collective's kind or its process group.
        """
        times_us = self.graph_times_us(graph)
        return {**times_us, **{node: self.collective_time_us(node) for node in fxn.collectives_of(graph)}}

    def collective_time_us(self, node: fx.Node) -> float:
        """Microseconds of the collective that ``node`` starts.

        Raises:
            UnsupportedOpError: nothing is known of its kind or its process group.
        """
        return node_collective_time_us(node, self.hardware, self.groups)

    def launch_time_us(self, kind: str, size_bytes: int, group_name: str) -> float:
        """Microseconds of one collective of ``kind``, with ``size_bytes`` on its larger side.

        Raises:
            UnsupportedOpError: nothing is known of the kind or the process group.
        """
        return collective_time_us(kind, size_bytes, self._shape_of(group_name), self.hardware)

    def moving_time_us(self, kind: str, size_bytes: float, group_name: str) -> float:
        """What its bytes take at the least, without latency, which collectives that share a launch pay once.

        Raises:
            UnsupportedOpError: nothing is known of the kind or the process group.
        """
        return moving_time_us(kind, size_bytes, self._shape_of(group_name), self.hardware)

    def link_shares(self, graph: fx.Graph) -> Shares:
        """What groups' collectives take of links that they could want more than all of together."""
        return shared_links(link_uses(graph), self.groups, self.hardware)

    def sendings(self, graph: fx.Graph, times_us: Mapping[fx.Node, float]) -> dict[fx.Node, Sending]:
        """What each collective of ``graph`` asks of links; ``times_us`` may hold what it takes alone.

        Raises:
            UnsupportedOpError: nothing is known of a kind or a process group.
        """
        return sendings_of(graph, self.hardware, self.groups, times_us)

    def saturating_bytes(self, kind: str, group_name: str, fraction: float = 0.9) -> int:
        """The size (of the larger side) from which a collective reaches ``fraction`` of its group's bandwidth.

        Raises:
            UnsupportedOpError: nothing is known of the kind or the process group.
        """
        return saturating_bytes(kind, self._shape_of(group_name), self.hardware, fraction)

    def timeline(self, graph: fx.Graph, times_us: Mapping[fx.Node, float] | None = None) -> Timeline:
        """When each call of ``graph`` runs, in its present order; ``times_us`` of any order save computing them.

        Raises:
            UnsupportedOpError: nothing is known of an operator or a process group.
        """
        return predict_timeline(graph, self.hardware, self.groups, times_us)

    def _shape_of(self, group_name: str) -> GroupShape:
        if group_name not in self.groups:
            raise UnsupportedOpError(
                f"nothing is known of process group {group_name!r}: {', '.join(self.groups)} are known"
            )
        return self.groups[group_name]
