"""Collectives of one group do not overlap; those of different groups still may."""

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


def in_flight(graph: fx.Graph) -> dict[str, int]:
    """The most collectives of each group that run at a time."""
    now: dict[str, int] = {}
    most: dict[str, int] = {}
    for node in graph.nodes:
        if fxn.collective_kind(node):
            group = fxn.group_of(node)
            now[group] = now.get(group, 0) + 1
            most[group] = max(most.get(group, 0), now[group])
        elif fxn.is_wait(node):
            now[fxn.group_of(node.all_input_nodes[0])] -= 1
    return most


@pytest.mark.parametrize(("groups", "notes"), [(("a", "a", "a"), 2), (("a", "b", "a"), 1), (("a", "b"), 0)])
def test_waits_come_before_the_next_of_their_group(groups: tuple[str, ...], notes: int):
    graph = overlapped(*groups)
    said = one_in_flight(graph)
    graph.lint()
    assert set(in_flight(graph).values()) == {1}
    assert said == ((f"{notes} waits moved ahead of the next collective of their group",) if notes else ())


def test_groups_still_overlap():
    graph = overlapped("a", "b")
    before = [node.name for node in graph.nodes]
    one_in_flight(graph)
    assert [node.name for node in graph.nodes] == before


@pytest.mark.parametrize(("backend", "runs"), [("gloo", True), ("nccl", False), ("fake", False)])
def test_it_runs_on_gloo_only(backend: str, runs: bool):
    assert ("one_in_flight" in [graph_pass.name for graph_pass in split_passes(backend)]) == runs
