"""Decomposed forward and backward train as the whole collectives do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.numerics.decomposed import compare, traced
from tests.support.worlds import Worlds

STEPS = 20
ORDERS = ["swizzle", "cyclic", "broadcast"]


def _check(results: list[dict[str, Any]], ranks: int, orders: list[str]) -> None:
    plain, *decomposed = results
    for order, one in zip(orders, decomposed, strict=True):
        for half in ("forward", "backward"):
            before, after = plain["launches"][half], one["launches"][half]
            assert "permute" not in before and "broadcast" not in before
            gathers = before["all_gather"] - after.get("all_gather", 0)
            scatters = before["all_to_all"] - after.get("all_to_all", 0)  # what they are over gloo
            assert gathers > 0 and scatters > 0
            if order == "broadcast":
                assert after["broadcast"] == gathers * ranks and after["permute"] == scatters * (ranks - 1)
            else:
                assert after["permute"] == (gathers + scatters) * (ranks - 1)
        assert one["losses"][0] == pytest.approx(plain["losses"][0], rel=1e-6)
        assert one["norms"] == pytest.approx(plain["norms"], rel=1e-6)
        assert one["losses"][STEPS - 1] == pytest.approx(plain["losses"][STEPS - 1], rel=1e-5)
        assert one["weights"] == pytest.approx(plain["weights"], rel=1e-5)
    assert plain["losses"][-1] < plain["losses"][0]


@pytest.mark.matrix
def test_llama_trains_as_with_whole_collectives(worlds: Worlds):
    for results in worlds(2).run(compare, ["swizzle"], STEPS):
        _check(results, 2, ["swizzle"])


@pytest.mark.matrix
def test_torch_compile_traces_through_transfers(worlds: Worlds):
    for plain, compiled in worlds(2).run(traced):
        assert compiled == plain


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_order_trains_as_whole_collectives_do(worlds: Worlds, ranks: int):
    for results in worlds(ranks).run(compare, ORDERS, STEPS):
        _check(results, ranks, ORDERS)
