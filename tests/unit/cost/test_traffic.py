"""Which groups share a link, and what each has of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_autoparallel.cost import GroupShape, HardwareSpec, hardware_named
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


def test_what_a_collective_takes_of_each_link():
    assert link_shares("all_gather", NODE, FAST) == {"inside": 1.0}
    assert link_shares("all_gather", ACROSS, FAST) == {"between": 1.0}
    assert link_shares("all_gather", FLAT, FAST) == {"inside": pytest.approx(8 * 42 / 340), "between": 1.0}
    # where the node's own link is the narrow one, adapters are not full
    narrow = replace(FAST, intra_node=LinkSpec(bandwidth_gb_per_s=168.0, latency_us=1.0))
    assert link_shares("all_reduce", FLAT, narrow) == {"inside": 1.0, "between": pytest.approx(0.5)}
    assert link_shares("permute", FLAT, FAST) == link_shares("all_to_all", FLAT, FAST) == {"between": 1.0}
    assert link_shares("all_gather", GroupShape(ranks=1), FAST) == {}


def shared(hardware: HardwareSpec, kind: str = "all_gather", **groups: GroupShape) -> dict[str, Any]:
    found = shared_links([(name, kind) for name in groups], groups, hardware)
    return {name: dict(links) for (name, _), links in found.items() if links}


def test_groups_that_use_one_link_share_it():
    assert shared(FAST, tp=NODE, dp=ACROSS) == {}
    assert shared(FAST, dp=ACROSS) == {}
    both = shared(FAST, tp=NODE, shard=ACROSS, replicate=OUTER)
    assert both == {"shard": {"between": 1.0}, "replicate": {"between": 1.0}}
    flat = shared(FAST, tp=NODE, flat=FLAT)
    assert flat == {"tp": {"inside": 1.0}, "flat": {"inside": pytest.approx(8 * 42 / 340)}}


def test_what_fits_beside_each_other_shares_nothing():
    pairs = GroupShape(ranks=4, nodes=2)  # two adapters of eight: a quarter of the node's link each
    assert shared(FAST, one=pairs, other=pairs) == {"one": {"between": 1.0}, "other": {"between": 1.0}}


def test_a_group_does_not_share_with_itself():
    uses = [("dp", "all_gather"), ("dp", "reduce_scatter"), ("unknown", "all_gather")]
    assert shared_links(uses, {"dp": ACROSS}, FAST) == {("dp", "all_gather"): {}, ("dp", "reduce_scatter"): {}}
