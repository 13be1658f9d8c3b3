"""The objective over tied blocks is what the plan costs on the unrolled graph, for every model of the numerics."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_autoparallel.pipeline.read_activations import read_activations
from lightning_autoparallel.plan import make_plans
from tests.numerics.models import LAYERED, MODELS, make_batches, make_model
from tests.unit._graphs import captured
from tests.unit.plan.test_automatic import MESH, costs_of, solved_both_ways, takes_as_much

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(600)]
LAYERS = 4  # of which the first and the last decide for themselves


@pytest.mark.parametrize("name", MODELS)
def test_what_was_solved_takes_as_much_unrolled(name: str, fake_mesh, monkeypatch) -> None:
    """Time, and room with what is saved and recomputed. Where no layer is repeated they are the same problem."""
    seen = solved_both_ways(monkeypatch)
    module = make_model(name, **({"layers": LAYERS} if name in LAYERED else {}))
    monkeypatch.setattr(module, "log", lambda *args, **kwargs: None)
    (batch,) = make_batches(name, 1, 4)
    graph = captured(module, batch, lambda rows: _loss(module.training_step(rows, 0)), shards=2)
    mesh, read = fake_mesh(**MESH), read_activations(graph, True, "full" if name in LAYERED else "none")
    assert read.saved and (read.recomputed or name not in LAYERED)
    make_plans(graph, "auto", mesh, print, costs=costs_of(mesh), with_others=False, activations=read)
    ((tied, unrolled),) = seen
    assert (len(unrolled.problem.choices) > len(tied.problem.choices)) == (name in LAYERED)
    takes_as_much(tied, unrolled)
    assert tied.stays_bytes > 0 and (name not in LAYERED or tied.stays_bytes < tied.most_bytes)


def _loss(result: Any) -> Any:
    return result["loss"] if isinstance(result, dict) else result
