"""Values at the edges of modules that rules pin: sequence-sharded activations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from lightning_autoparallel.config import PlanRule
from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.plan.parameter_storage import rule_placement


def edge_pins(graph: fx.Graph, rules: Sequence[PlanRule], axis: PlanAxis) -> dict[fx.Node, Placement]:
    """The placements on ``axis`` of the values that capture has marked as a module's inputs or outputs.

    Gradients are marked too: they are placed as the values they belong to.

    Raises:
        ConfigError: a rule names a dim that the value has not, or that the axis does not divide.
    """
    pins: dict[fx.Node, Placement] = {}
    for node in graph.nodes:
        edge = fxn.edge_of(node)
        if edge is None:
            continue
        kind, _, path = edge.partition(":")
        value = node.meta["val"]
        found = rule_placement([rule for rule in rules if rule.kind == kind], path, value.shape, axis)
        if found is not None:
            pins[node] = found[0]
    return pins
