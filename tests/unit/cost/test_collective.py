"""Times of collectives: worked out by hand, and never better than what NCCL is published to reach."""

from __future__ import annotations

import pytest

from lightning_autoparallel.cost import CostModel, GroupShape, hardware_named
from lightning_autoparallel.cost.collective import (
    COLLECTIVES,
    collective_time_us,
    latency_us,
    moved_share,
    ring_gb_per_s,
    saturating_bytes,
)
from lightning_autoparallel.errors import UnsupportedOpError
from tests.unit.cost._graphs import ROUND

FOUR, TWO_BY_TWO = GroupShape(ranks=4), GroupShape(ranks=4, nodes=2)
BIG = 8 * 2**30


@pytest.mark.parametrize(
    ("kind", "group", "expected_us"),
    [
        # 10 to start, 3 hops of 2, three quarters of 4000 bytes at 1000 per us
        ("all_gather", FOUR, 10 + 6 + 3),
        ("reduce_scatter", FOUR, 10 + 6 + 3),
        # a ring takes both ways; a tree (the chain of 3 hops up and down) has the same latency, half the bandwidth
        ("all_reduce", FOUR, 10 + 12 + 6),
        ("all_to_all", FOUR, 10 + 2 + 3),
        ("permute", FOUR, 10 + 2 + 4),
        ("broadcast", FOUR, 10 + 6 + 4),
        # 2 hops inside of nodes and 1 between; two adapters of 250 bytes per us feed each node
        ("all_gather", TWO_BY_TWO, 10 + (2 * 2 + 5) + 3000 / 500),
        # two of the other three ranks are on the other node: 2000 bytes through a rank's own adapter
        ("all_to_all", TWO_BY_TWO, 10 + 5 + 2000 / 250),
        ("permute", TWO_BY_TWO, 10 + 5 + 4000 / 250),
    ],
    ids=str,
)
def test_worked_out_by_hand(kind, group, expected_us):
    assert collective_time_us(kind, 4000, group, ROUND) == pytest.approx(expected_us)


def test_a_small_all_reduce_over_many_nodes_takes_a_tree():
    """Up and down 4 levels of the tree over 16 nodes, not 30 hops of the ring."""
    group = GroupShape(ranks=16, nodes=16)
    tree_us = 10 + 2 * 4 * 5 + 16 * (2 * 15 / 16) / 250 * 2
    assert collective_time_us("all_reduce", 16, group, ROUND) == pytest.approx(tree_us)
    assert collective_time_us("all_reduce", 10**6, group, ROUND) == pytest.approx(10 + 2 * 15 * 5 + 10**6 * 1.875 / 250)


@pytest.mark.parametrize("size_bytes", [10**5, 16_800_000, 10**9])
def test_bytes_that_share_a_launch_take_what_they_take_beside_large_ones(size_bytes):
    """Also of an all-reduce so small that by itself it takes a tree: what a launch of 10 GB takes more with it."""
    h100, group = hardware_named("h100"), GroupShape(ranks=64, nodes=8)
    costs = CostModel(hardware=h100, groups={"all": group})
    for kind in COLLECTIVES:
        large, both = (collective_time_us(kind, size, group, h100) for size in (10**10, 10**10 + size_bytes))
        moving_us = costs.moving_time_us(kind, size_bytes, "all")
        assert moving_us == pytest.approx(both - large, rel=1e-4)
        assert 0 < moving_us <= costs.launch_time_us(kind, size_bytes, "all")
    # 63/64 of the bytes go out and come back through a rank's 8 x 50 GB/s, or its node's switch
    gb_per_s = min(h100.intra_node.bandwidth_gb_per_s, 8 * h100.inter_node.bandwidth_gb_per_s)
    by_hand_us = 2 * 63 / 64 * size_bytes / (gb_per_s * 1e3)
    assert costs.moving_time_us("all_reduce", size_bytes, "all") == pytest.approx(by_hand_us)


def test_nothing_to_do_takes_no_time():
    for kind in COLLECTIVES:
        assert collective_time_us(kind, 4000, GroupShape(ranks=1), ROUND) == 0
        assert collective_time_us(kind, 0, FOUR, ROUND) == 0


def test_an_unknown_kind_is_an_error():
    with pytest.raises(UnsupportedOpError, match="'scan' has no cost"):
        collective_time_us("scan", 4000, FOUR, ROUND)
    with pytest.raises(UnsupportedOpError, match="'scan' has no cost"):
        saturating_bytes("scan", FOUR, ROUND)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all", "broadcast", "permute"])
@pytest.mark.parametrize("group", [FOUR, TWO_BY_TWO], ids=str)
def test_at_the_saturating_size_a_tenth_is_latency(kind, group):
    size = saturating_bytes(kind, group, ROUND, fraction=0.9)
    assert latency_us(kind, group, ROUND) == pytest.approx(0.1 * collective_time_us(kind, size, group, ROUND), rel=1e-3)


# GB/s as nccl-tests report them, for large messages. The replies are of NCCL's maintainers.
PUBLISHED = [
    # NCCL takes a ring on A100s for 235 at most: NVIDIA/nccl src/graph/tuning.cc (compCap80); "close to 240" in
    # NVIDIA/nccl issue 1712.
    ("a100-80gb", "all_reduce", GroupShape(ranks=8), 235.0),
    # 24 GB/s per HDR adapter "on perfect setups": NVIDIA/nccl-tests issue 160.
    ("a100-80gb", "all_gather", GroupShape(ranks=2, nodes=2), 24.0),
    # 370 GB/s effective, "when running non-allreduce operations, or when running with NCCL_ALGO=RING":
    # NVIDIA/nccl-tests issue 212.
    ("h100", "all_gather", GroupShape(ranks=8), 370.0),
    ("h100", "reduce_scatter", GroupShape(ranks=8), 370.0),
    ("h100", "all_to_all", GroupShape(ranks=8), 370.0),
    ("h100", "broadcast", GroupShape(ranks=8), 370.0),
    # 476 GB/s with NVLink SHARP, and 46 to 48 per NDR adapter: NVIDIA/nccl-tests issue 290.
    ("h100", "all_reduce", GroupShape(ranks=8), 476.0),
    ("h100", "all_gather", GroupShape(ranks=2, nodes=2), 46.0),
    ("h100", "permute", GroupShape(ranks=2, nodes=2), 46.0),
    # 256 H100 on 32 nodes, eight NDR adapters each, 2 GB: 340 GB/s: NVIDIA/nccl issue 1218.
    ("h100", "all_reduce", GroupShape(ranks=256, nodes=32), 340.0),
    # 475 GB/s at 4 GB: NVIDIA/nccl-tests issue 272; about 350 on 248 nodes: NVIDIA/nccl-tests issue 283.
    ("h200", "all_reduce", GroupShape(ranks=8), 475.0),
    ("h200", "all_reduce", GroupShape(ranks=1984, nodes=248), 350.0),
    # 830 GB/s with NVLink SHARP, and 721.8 as NCCL's own model has it for rings: NVIDIA/nccl issue 1807.
    ("b200", "all_reduce", GroupShape(ranks=8), 830.0),
    ("b200", "all_gather", GroupShape(ranks=8), 721.8),
    # 7 links of 48 GB/s: rocm.blogs.amd.com, "Understanding RCCL Bandwidth and xGMI Performance on AMD Instinct MI300X"
    ("mi300x", "all_gather", GroupShape(ranks=8), 336.0),
]


@pytest.mark.parametrize(("name", "kind", "group", "published"), PUBLISHED, ids=str)
def test_bus_bandwidths_stay_below_those_published(name, kind, group, published):
    """Bus bandwidth as nccl-tests define it: moved bytes per link over time."""
    hardware = hardware_named(name)
    predicted = BIG * moved_share(kind, group.ranks) / collective_time_us(kind, BIG, group, hardware) / 1e3
    assert predicted <= published
    if group.ranks <= 8:  # many hops of latency are not a bandwidth
        assert predicted > 0.7 * ring_gb_per_s(group, hardware) and predicted > 0.6 * published
