"""What is said to be enough where no plan fits is enough: each change is made, and the step planned again."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from lightning_autoparallel.contracts import NodePlacement, PlanReport
from lightning_autoparallel.cost import hardware_from
from lightning_autoparallel.errors import InfeasiblePlanError
from lightning_autoparallel.pipeline import remedies
from lightning_autoparallel.pipeline.remedies import _recomputing
from lightning_autoparallel.plan import Activations
from lightning_autoparallel.strategy.planning import plan
from tests.unit.pipeline.test_found_plan import GIB, Deep

ROWS, RANKS = 2**13, 8


def planned(budget_gib: float, rows: int = ROWS, mesh: dict[str, int] | None = None, **options: Any) -> PlanReport:
    with torch.device("meta"):
        module = Deep()
    mesh = mesh or {"dp_shard": RANKS}
    ranks = torch.Size(mesh.values()).numel()
    given: dict[str, Any] = {"mesh": mesh, "plan": "auto", "world_size": ranks, "hardware": "h100", **options}
    return plan(module, torch.zeros(rows, 512), memory_budget_gib=budget_gib, **given)


def said(budget_gib: float, **options: Any) -> str:
    with pytest.raises(InfeasiblePlanError) as caught:
        planned(budget_gib, **options)
    return str(caught.value).rpartition("; ")[2]


def fits(report: PlanReport, budget_gib: float) -> bool:
    return report.training_peak_bytes is not None and report.training_peak_bytes <= budget_gib * GIB


def test_recomputing_more_is_enough() -> None:
    told = said(0.9)
    (policy,) = re.findall(r"activation_checkpointing '([\w:]+)' \(0\.\d+ GiB\)", told)
    assert policy != "none"
    assert fits(planned(0.9, activation_checkpointing=policy), 0.9)


@pytest.mark.matrix
def test_fewer_rows_are_enough() -> None:
    told = said(0.25, activation_checkpointing="full")
    ((rows, before, times),) = re.findall(r"(\d+) rows per rank, not (\d+), with accumulate_grad_\w+ (\d+) ti", told)
    assert int(before) == ROWS and int(rows) * int(times) == ROWS
    fewer: dict[str, Any] = {"rows": int(rows), "activation_checkpointing": "full"}
    assert fits(planned(0.25, accumulate_grad_batches=int(times), **fewer), 0.25)


def test_gradients_of_fewer_rows_that_add_up_need_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 8 rows of 800 bytes, a parameter of 100; the backward reads all that the rows take."""
    added, first, reserved = (_fewer_rows_of(monkeypatch, *of) for of in ((True,), (False,), (False, 0.25)))
    assert reserved == ("4 rows per rank, not 8, with accumulate_grad_batches 2 times as large", 800 - 300 * 1.25)
    assert added == ("4 rows per rank, not 8, with accumulate_grad_batches 2 times as large", 800 - 400)
    assert first == ("2 rows per rank, not 8, with accumulate_grad_batches 4 times as large", 800 - 600 + 100)


def _fewer_rows_of(monkeypatch: pytest.MonkeyPatch, add_up: bool, share: float = 0.0) -> tuple[str, float]:
    monkeypatch.setattr(remedies, "global_rows", lambda captured: 16)
    monkeypatch.setattr(remedies, "_bytes_of_rows", lambda short: 800.0)
    monkeypatch.setattr(remedies, "stored_bytes", lambda captured, plan, trained_only: {"w": 100.0})
    short: Any = SimpleNamespace(captured=None, plan=None, needed_bytes=800.0, add_up=add_up)
    short.budget_bytes, short.hardware = 450.0, hardware_from({"base": "h100", "reserved_share": share})
    (found,) = remedies._fewer_rows(short, shards=2)
    return found


@pytest.mark.parametrize(
    ("mesh", "axis", "rows", "budget"),
    [
        ({"dp_shard": 2}, "dp_shard", 64, 0.15),
        pytest.param({"dp_shard": 2, "tp": 2}, "tp", 2**12, 0.25, marks=pytest.mark.matrix),
    ],
)
def test_more_ranks_are_enough(mesh: dict[str, int], axis: str, rows: int, budget: float) -> None:
    """Each of dp_shard has the rows that it had."""
    told = said(budget, mesh=mesh, rows=rows)
    (times,) = re.findall(rf"(\d+) times the ranks on {axis} \(", told)
    assert int(times) > 1
    assert fits(planned(budget, rows=rows, mesh={**mesh, axis: int(times) * mesh[axis]}), budget)


def test_where_no_change_is_enough_it_says_so() -> None:
    told = said(0.05, activation_checkpointing="full")
    assert re.fullmatch(r"no single change of recomputing, rows or ranks is enough by estimate: .* GiB", told), told


def test_a_policy_that_keeps_more_is_no_remedy() -> None:
    """By hand, where of values of 100 bytes one is computed again at a time: 200, 300 and 100 bytes are read."""
    every = {"none": {"a", "b", "c"}, "layer:2": {"b", "c"}, "full": set[str]()}
    assert _recomputing_of(kept_now={"a"}, kept_with=every) == [("activation_checkpointing 'full'", 0.0)]
    assert _recomputing_of(kept_now=set(), kept_with=every) == []
    assert _recomputing_of(kept_now={"a", "b", "c"}, kept_with=every | {"layer:2": {"c"}}) == [
        ("activation_checkpointing 'layer:2'", 200.0)
    ]


def _recomputing_of(kept_now: set[str], kept_with: dict[str, set[str]]) -> list[tuple[str, float]]:
    """Of three values of 100 bytes, which never meet; a rank needs 100 bytes too many."""
    graph = fx.Graph()
    for name in ("a", "b", "c"):
        node = graph.placeholder(name)
        node.meta = {"val": torch.empty(25)}
    captured = SimpleNamespace(graph_module=SimpleNamespace(graph=graph))

    def read_with(kept: set[str]) -> Activations:
        return Activations(saved=kept, recomputed=[[name] for name in ("a", "b", "c") if name not in kept])

    nodes = {name: NodePlacement(inputs=(), outputs=((),)) for name in ("a", "b", "c")}
    plan = SimpleNamespace(nodes=nodes, axes=())
    short: Any = SimpleNamespace(captured=captured, plan=plan, activations=read_with(kept_now))
    short.hardware = hardware_from("h100")
    short.needed_bytes, short.budget_bytes = 100.0 * len(kept_now), 100.0 * len(kept_now) - 100
    return list(_recomputing(short, ("layer:2", "full"), lambda policy: read_with(kept_with[policy])))
