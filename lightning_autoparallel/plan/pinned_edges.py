"""Values at the edges of modules that rules pin: sequence-sharded activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from lightning_autoparallel.config import PlanRule
from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.plan.parameter_storage import rule_placement


def edge_pins(
    graph: fx.Graph, rules: Sequence[PlanRule], axis: PlanAxis, left_out: Callable[[str], None] | None = None
) -> dict[fx.Node, Placement]:
    """The placements on ``axis`` of the values that capture has marked as a module's inputs or outputs.

    Gradients are marked too: they are placed as the values they belong to. ``left_out`` is told, once each, of what
    rules cannot do with a value, which then lies as if there were none.

    Raises:
        ConfigError: nobody is told, and a rule names a dim that the value has not, or that the axis does not divide.
    """
    pins: dict[fx.Node, Placement] = {}
    told: set[str] = set()
    for node in graph.nodes:
        edge = fxn.edge_of(node)
        if edge is None:
            continue
        kind, _, path = edge.partition(":")
        value = node.meta["val"]
        try:
            found = rule_placement([rule for rule in rules if rule.kind == kind], path, value.shape, axis)
        except ConfigError as error:
            if left_out is None:
                raise
            if str(error) not in told:
                left_out(str(error))
            told.add(str(error))
            continue
        if found is not None:
            pins[node] = found[0]
    return pins
