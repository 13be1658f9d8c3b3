"""Graphs with all-reduces over ``tp`` and ``dp``, two ranks each, and what they cost."""

from __future__ import annotations

import random

from torch import fx

from lightning_autoparallel.cost import CostModel, GroupShape
from lightning_autoparallel.torch_compat import collectives
from tests.unit.cost._graphs import ROUND, Builder, aten

COSTS = CostModel(hardware=ROUND, groups={name: GroupShape(ranks=2) for name in ("tp", "dp")})
WIDTH = 64


def reduce_over(build: Builder, value: fx.Node, group: str, role: str | None = None) -> fx.Node:
    """The sum of ``value`` over ``group``, waited for at once."""
    started = build.valued(value.meta["val"], collectives.ALL_REDUCE, value, "sum", group)
    started.meta["collective_role"] = role
    return build.wait(started)


def random_graph(seed: int) -> fx.Graph:
    """Sums and products of any earlier values, some of them reduced."""
    choose = random.Random(seed)
    build = Builder()
    values = [build.input(WIDTH, WIDTH) for _ in range(4)]
    for _ in range(40):
        kind = choose.choice(["mm", "mm", "add", "tp", "dp", "t"])
        one, two = choose.choice(values), choose.choice(values[-6:])
        if kind == "mm":
            values.append(build.call(aten.mm.default, one, two))
        elif kind == "add":
            values.append(build.call(aten.add.Tensor, one, two))
        elif kind == "t":
            values.append(build.call(aten.clone.default, build.call(aten.t.default, two)))
        else:
            values.append(reduce_over(build, two, kind))
    return build.output(*(value for value in values if not value.users))
