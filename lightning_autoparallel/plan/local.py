"""Local programs: on the axes that share out the batch every value is the rank's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import fx
from torch.distributed.tensor.placement_types import Replicate

from lightning_autoparallel.config import PlanSpec
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.plan.candidates import Candidate


def own_values(graph: fx.Graph) -> dict[fx.Node, Candidate]:
    """The choice of every call and placeholder on the batch axes: it is computed from what the rank has.

    Written as replicated, which here means that nothing is shared out and nothing is moved.
    """
    return {
        node: Candidate(
            outputs=tuple(None if value is None else Replicate() for value in fxn.values(node)),
            inputs=(Replicate(),) * len(fxn.tensor_arguments(node)),
            time_us=0.0,
        )
        for node in graph.nodes
        if node.op != "output" and not fxn.is_getitem(node)
    }


def local_spec(spec: PlanSpec, parameters: Mapping[str, object]) -> PlanSpec:
    """``spec`` without the rules of parameters that are not there: a module call does not read all."""
    rules = tuple(
        rule for rule in spec.rules if rule.is_edge or any(fnmatchcase(name, rule.pattern) for name in parameters)
    )
    return dataclasses.replace(spec, rules=rules)
