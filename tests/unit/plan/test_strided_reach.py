"""Strided shards that nothing makes, or that nothing reads, are no candidates; the others stay."""

from __future__ import annotations

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from lightning_autoparallel.fx.placements import shard
from lightning_autoparallel.plan.candidates import Candidate
from lightning_autoparallel.plan.strided_reach import reached

WHOLE, ROWS, INSIDE = Replicate(), Shard(0), shard(0, 4)  # INSIDE: of rows in 4 blocks, a part of each


def way(output: Placement, *inputs: Placement) -> Candidate:
    return Candidate(outputs=(output,), inputs=inputs, time_us=0.0)


def chain(*calls: tuple[Candidate, ...]) -> tuple[list[fx.Node], dict[fx.Node, tuple[Candidate, ...]]]:
    """A placeholder and calls, each of which reads the one before."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in calls[1:]:
        nodes.append(graph.call_function(torch.relu, (nodes[-1],)))
    return nodes, dict(zip(nodes, calls, strict=True))


def left(*calls: tuple[Candidate, ...]) -> list[tuple[Candidate, ...]]:
    nodes, candidates = chain(*calls)
    kept = reached(candidates, lambda node: [(source, 0) for source in node.all_input_nodes])
    return [kept[node] for node in nodes]


SAME = (way(WHOLE, WHOLE), way(ROWS, ROWS), way(INSIDE, INSIDE))


def test_where_no_view_makes_one_no_strided_shard_is_left() -> None:
    assert left((way(WHOLE), way(ROWS)), SAME, SAME) == [(way(WHOLE), way(ROWS)), SAME[:2], SAME[:2]]


def test_what_a_view_makes_goes_on_to_whoever_reads_it() -> None:
    merging = (way(WHOLE, WHOLE), way(INSIDE, Shard(1)))
    splitting = (way(WHOLE, WHOLE), way(Shard(1), INSIDE))
    kept = left((way(WHOLE), way(Shard(1))), merging, SAME, splitting)
    assert kept[1:] == [merging, SAME, splitting]


def test_what_nobody_reads_strided_is_not_made_so() -> None:
    merging = (way(WHOLE, WHOLE), way(INSIDE, Shard(1)))
    assert left((way(WHOLE), way(Shard(1))), merging, SAME[:2])[1] == merging[:1]


def test_a_node_keeps_at_least_its_first_candidate() -> None:
    only = (way(INSIDE, INSIDE),)
    assert left((way(WHOLE),), only)[1] == only
