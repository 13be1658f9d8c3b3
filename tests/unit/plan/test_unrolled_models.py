"""The objective over tied blocks is what the plan costs on the unrolled graph, for every model of the numerics."""

from __future__ import annotations

from typing import Any

import pytest

from tests.numerics.models import MODELS, make_batches, make_model
from tests.unit._graphs import captured
from tests.unit.plan.test_automatic import MESH, planned, solved_both_ways

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("name", MODELS)
def test_what_was_solved_costs_as_much_unrolled(name: str, fake_mesh, monkeypatch) -> None:
    """Where nothing repeats they are the same problem."""
    seen = solved_both_ways(monkeypatch)
    module = make_model(name)
    monkeypatch.setattr(module, "log", lambda *args, **kwargs: None)
    (batch,) = make_batches(name, 1, 4)
    graph = captured(module, batch, lambda rows: _loss(module.training_step(rows, 0)), shards=2)
    planned(fake_mesh(**MESH), graph)
    ((tied, time_us, unrolled, each_us),) = seen
    assert len(unrolled.choices) >= len(tied.choices)
    assert each_us == pytest.approx(time_us, rel=1e-9)
    assert time_us > 0


def _loss(result: Any) -> Any:
    return result["loss"] if isinstance(result, dict) else result
