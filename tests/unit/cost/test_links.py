"""Rates of kinds of collectives: in place of a link's own, read from what users write, and used by the cost model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_autoparallel.cost import GroupShape, LinkSpec, hardware_from
from lightning_autoparallel.cost.collective import collective_time_us
from lightning_autoparallel.errors import ConfigError
from tests.unit.cost._graphs import ROUND

FOUR = GroupShape(ranks=4)
SLOW = LinkSpec(bandwidth_gb_per_s=0.5, latency_us=4.0)


def with_kinds(**kinds: LinkSpec):
    return replace(ROUND, intra_node=replace(ROUND.intra_node, kinds=kinds))


def test_a_kind_has_its_own_rates_and_others_those_of_the_link():
    hardware = with_kinds(reduce_scatter=SLOW)
    assert collective_time_us("reduce_scatter", 4000, FOUR, hardware) == pytest.approx(10 + 3 * 4 + 3000 / 500)
    assert collective_time_us("all_gather", 4000, FOUR, hardware) == collective_time_us("all_gather", 4000, FOUR, ROUND)


@pytest.mark.parametrize(("kind", "moved"), [("all_to_all", 3000), ("permute", 4000)])
def test_what_every_rank_sends_itself(kind, moved):
    assert collective_time_us(kind, 4000, FOUR, with_kinds(**{kind: SLOW})) == pytest.approx(10 + 4 + moved / 500)


def test_a_measured_all_reduce_takes_no_tree_beside():
    """A tree with the latency of the link itself, 10 + 6 * 2 + 4000 * 2 * 1.5 / 500 us, would be faster."""
    slow = replace(SLOW, latency_us=40.0)
    expected = 10 + 6 * 40 + 6000 / 500
    assert collective_time_us("all_reduce", 4000, FOUR, with_kinds(all_reduce=slow)) == pytest.approx(expected)


def test_kinds_are_read_over_those_of_the_base():
    given = {"base": "cpu", "intra_node": {"latency_us": 7.0, "kinds": {"broadcast": {"bandwidth_gb_per_s": 9.0}}}}
    link = hardware_from(given).intra_node
    assert (link.latency_us, link.of("all_gather").latency_us) == (7.0, 7.0)
    assert (link.of("broadcast").bandwidth_gb_per_s, link.of("broadcast").latency_us) == (9.0, 7.0)
    assert link.as_json()["kinds"] == {"broadcast": {"bandwidth_gb_per_s": 9.0, "latency_us": 7.0}}


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ({"kinds": {"gather": {}}}, "no kind of collective 'gather'"),
        ({"kinds": {"all_gather": 3}}, "intra_node.kinds.all_gather is 3, but must be a mapping"),
        ({"kinds": {"all_gather": {"latency": 3}}}, "intra_node.kinds.all_gather has no key 'latency'"),
        ({"kinds": {"all_gather": {"latency_us": -1}}}, "latency_us is -1"),
    ],
    ids=str,
)
def test_mistakes_are_said(link, message):
    with pytest.raises(ConfigError, match=message):
        hardware_from({"base": "cpu", "intra_node": link})
