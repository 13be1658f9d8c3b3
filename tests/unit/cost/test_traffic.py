"""Which groups share a link, and what each has of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_autoparallel.cost import GroupShape, hardware_named
from lightning_autoparallel.cost.collective import link_shares
from lightning_autoparallel.cost.links import LinkSpec
from lightning_autoparallel.cost.traffic import shared_links

# A node of 8 whose ranks reach each other at 340 GB/s, and other nodes at 42 each.
FAST = replace(
    hardware_named("h100"),
    intra_node=LinkSpec(bandwidth_gb_per_s=340.0, latency_us=1.0),
    inter_node=LinkSpec(bandwidth_gb_per_s=42.0, latency_us=5.0),
)
NODE, ACROSS, OUTER = GroupShape(ranks=8), GroupShape(ranks=16, nodes=16), GroupShape(ranks=2, nodes=2)
FLAT = GroupShape(ranks=128, nodes=16)


def test_what_a_ring_takes_of_each_link():
    assert link_shares(NODE, FAST) == {"inside": 1.0}
    assert link_shares(ACROSS, FAST) == {"between": 1.0}
    assert link_shares(FLAT, FAST) == {"inside": pytest.approx(8 * 42 / 340), "between": pytest.approx(1.0)}
    # where the node's own link is the narrow one, adapters are not full
    assert link_shares(FLAT, replace(FAST, intra_node=LinkSpec(bandwidth_gb_per_s=168.0, latency_us=1.0))) == {
        "inside": pytest.approx(1.0),
        "between": pytest.approx(0.5),
    }
    assert link_shares(GroupShape(ranks=1), FAST) == {}


def test_groups_that_use_one_link_share_it():
    assert shared_links({"tp": NODE, "dp": ACROSS}, FAST) == {}
    assert shared_links({"dp": ACROSS}, FAST) == {}
    both = shared_links({"tp": NODE, "shard": ACROSS, "replicate": OUTER}, FAST)
    assert both == {"shard": {"between": 1.0}, "replicate": {"between": 1.0}}
    flat = shared_links({"tp": NODE, "dp,tp": FLAT}, FAST)
    assert flat == {"tp": {"inside": 1.0}, "dp,tp": {"inside": pytest.approx(8 * 42 / 340)}}


def test_what_fits_beside_each_other_shares_nothing():
    pairs = GroupShape(ranks=4, nodes=2)  # two adapters of eight: a quarter of the node's link
    narrow = replace(FAST, intra_node=LinkSpec(bandwidth_gb_per_s=336.0, latency_us=1.0))
    assert shared_links({"one": pairs, "other": pairs}, narrow) == {
        "one": {"between": 1.0},
        "other": {"between": 1.0},
    }
