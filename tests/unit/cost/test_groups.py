"""How groups of a mesh are spread over nodes."""

from __future__ import annotations

import pytest

from lightning_autoparallel.cost import GroupShape, group_shape, group_shapes

MESH = {"dp_replicate": 2, "dp_shard": 8, "tp": 8}


@pytest.mark.parametrize(
    ("axes", "ranks", "nodes"),
    [
        (("tp",), 8, 1),
        (("dp_shard",), 8, 8),
        (("dp_replicate",), 2, 2),
        (("dp_shard", "tp"), 64, 8),
        (("dp_replicate", "dp_shard", "tp"), 128, 16),
        (("dp_replicate", "tp"), 16, 2),
    ],
    ids=str,
)
def test_a_mesh_of_sixteen_nodes(axes, ranks, nodes):
    assert group_shape(MESH, axes, ranks_per_node=8) == GroupShape(ranks=ranks, nodes=nodes)


def test_an_axis_across_the_border_of_a_node_counts_as_on_both():
    """Ranks 3 to 5 lie on nodes 0 and 1, ranks 0 to 2 on node 0 alone."""
    assert group_shape({"dp_shard": 2, "tp": 3}, ("tp",), ranks_per_node=4) == GroupShape(ranks=3, nodes=2)


def test_the_narrowest_node_is_the_one_with_fewest_ranks():
    """Ranks 0 to 7 lie on the first node, 8 to 11 on the second: 4, and not half of 12."""
    shape = group_shape({"dp_shard": 12}, ("dp_shard",), ranks_per_node=8)
    assert (shape.ranks, shape.nodes, shape.ranks_per_node) == (12, 2, 4)
    # groups of six: the first on one node, the second with two ranks on the first node and four on the next
    assert group_shape({"dp_shard": 2, "tp": 6}, ("tp",), ranks_per_node=8).ranks_per_node == 2


def test_one_node_holds_everything():
    shapes = group_shapes({"dp_shard": 4, "tp": 2}, [("dp_shard",), ("tp", "dp_shard")], ranks_per_node=8)
    assert shapes == {("dp_shard",): GroupShape(ranks=4), ("tp", "dp_shard"): GroupShape(ranks=8)}
    assert shapes["dp_shard",].ranks_per_node == 4
