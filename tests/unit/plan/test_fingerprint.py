"""Ranks compare their programs; the first difference is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_autoparallel.plan import fingerprint_lines, first_difference, make_plan
from tests.unit._graphs import captured

X = torch.randn(4, 4)


def lines(fake_mesh, step=None, plan: str = "fsdp") -> list[str]:
    module = nn.Linear(4, 4)
    graph = captured(module, X, step or (lambda x: module(x).relu().sum()), shards=2)
    return fingerprint_lines(graph, make_plan(graph, plan, fake_mesh(dp_shard=2), print))


def test_equal_programs_have_equal_lines(fake_mesh):
    mesh = fake_mesh(dp_shard=2)
    both = [lines(lambda **_: mesh) for _ in range(2)]
    compared = [[line.split("\t", 1)[1] for line in each] for each in both]
    assert compared[0] == compared[1]
    assert first_difference(both[0], both) is None


def test_the_first_differing_node_is_named(fake_mesh):
    mesh = fake_mesh(dp_shard=2)
    mine, theirs = (lines(lambda **_: mesh, step) for step in (torch.sum, lambda x: x.relu().sum()))
    rank, node = first_difference(mine, [mine, mine, theirs])
    assert rank == 2
    assert node.startswith("relu")


def test_values_that_python_made_are_compared(fake_mesh):
    mesh = fake_mesh(dp_shard=2)
    mine, theirs = (lines(lambda **_: mesh, lambda x, n=n: (x * torch.tensor(n)).sum()) for n in (1.0, 2.0))
    assert first_difference(mine, [mine, theirs]) == (1, "constant_0")


def test_placements_are_compared_too(fake_mesh):
    """The same graph with another plan is another program."""
    mine = ["a (x.py:1)\ta = op R", "b (x.py:2)\tb = op R"]
    theirs = ["a (x.py:1)\ta = op R", "b (x.py:2)\tb = op S(0)"]
    assert first_difference(mine, [mine, theirs]) == (1, "b (x.py:2)")


@pytest.mark.parametrize("longer_first", [True, False])
def test_a_longer_program_differs_at_its_first_extra_node(longer_first: bool):
    short, long = ["a\ta"], ["a\ta", "b (x.py:2)\tb"]
    mine, theirs = (long, short) if longer_first else (short, long)
    assert first_difference(mine, [mine, theirs]) == (1, "b (x.py:2)")


def test_where_it_stands_is_not_compared():
    """Ranks may run the same code from different folders."""
    assert first_difference(["a (x.py:1)\ta"], [["a (y.py:9)\ta"]]) is None
