"""Which gradients a backward gives anybody: those that the results with gradients of their own lead to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import fx

from lightning_autoparallel.contracts import CapturedGraph

_KEPT = "gradients_by_result"
Gradient = tuple[str, str]  # the kind and the name of the input that it is of


def reached_gradients(captured: CapturedGraph, given: Collection[int]) -> frozenset[Gradient]:
    """The gradients that depend on one of the ``given`` results, by their places among those that have gradients.

    Autograd leaves the others alone: an optimizer skips a parameter without a gradient, and decays one of zeros.
    """
    meta: dict[str, Any] = captured.graph_module.meta
    if _KEPT not in meta:
        meta[_KEPT] = _by_result(captured)
    by_result: Mapping[int, frozenset[Gradient]] = meta[_KEPT]
    return frozenset().union(*(by_result[i] for i in given))


def _by_result(captured: CapturedGraph) -> dict[int, frozenset[Gradient]]:
    """Of the graph as it was captured: in later ones several gradients come from one collective."""
    graph = captured.graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    tangents = [n for n, item in zip(placeholders, captured.inputs, strict=True) if item.kind == "tangent"]
    results = next(iter(graph.find_nodes(op="output"))).args[0]
    found: dict[int, frozenset[Gradient]] = {}
    for i, tangent in enumerate(tangents):
        dependent = _dependent_on(tangent)
        pairs = zip(results, captured.outputs, strict=True)
        found[i] = frozenset((item.of, item.name) for n, item in pairs if item.kind == "gradient" and n in dependent)
    return found


def _dependent_on(node: fx.Node) -> set[fx.Node]:
    dependent, waiting = {node}, [node]
    while waiting:
        new = [user for user in waiting.pop().users if user not in dependent]
        dependent.update(new)
        waiting += new
    return dependent
