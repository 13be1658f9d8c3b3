"""Collectives do not overlap, of whatever group they are."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes import split_passes
from lightning_autoparallel.passes.one_in_flight import one_in_flight
from lightning_autoparallel.torch_compat import collectives

aten = torch.ops.aten


def overlapped(*groups: str) -> fx.Graph:
    """One all-reduce per group, all started before the first is waited for."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    started = [graph.call_function(collectives.ALL_REDUCE, (x, "sum", group)) for group in groups]
    waits = [graph.call_function(collectives.WAIT, (node,)) for node in started]
    graph.output([graph.call_function(aten.neg.default, (wait,)) for wait in waits])
    return graph


def in_flight(graph: fx.Graph) -> int:
    """The most collectives that run at a time."""
    now = most = 0
    for node in graph.nodes:
        now += (fxn.collective_kind(node) is not None) - fxn.is_wait(node)
        most = max(most, now)
    return most


@pytest.mark.parametrize(("groups", "notes"), [(("a", "a", "a"), 2), (("a", "b", "a"), 2), (("a",), 0)])
def test_waits_come_before_the_next_collective(groups: tuple[str, ...], notes: int):
    graph = overlapped(*groups)
    assert in_flight(graph) == len(groups)
    said = one_in_flight(graph)
    graph.lint()
    assert in_flight(graph) == 1
    assert said == ((f"{notes} waits moved ahead of the next collective",) if notes else ())


@pytest.mark.parametrize(("backend", "runs"), [("gloo", True), ("nccl", False), ("fake", False)])
def test_it_runs_on_gloo_only(backend: str, runs: bool):
    assert ("one_in_flight" in [graph_pass.name for graph_pass in split_passes(backend)]) == runs
