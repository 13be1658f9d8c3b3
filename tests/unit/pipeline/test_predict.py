"""What a report predicts: memory also where times are unknown, and tokens where there are any."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lightning_autoparallel.apply import parameter_layouts
from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.cost import CostModel, GroupShape
from lightning_autoparallel.cost.memory import predict_step_memory
from lightning_autoparallel.pipeline.predict import around_us, hardware_of_devices, stored_bytes, with_predictions
from lightning_autoparallel.plan import make_plan
from tests.unit._graphs import captured, report_of
from tests.unit.compile.joint import Joint
from tests.unit.cost._graphs import ROUND, aten

EMPTY = report_of()


class Sum(nn.Module):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return sum(value.sum() for value in batch.values())


def _predicted(groups: dict[str, GroupShape], batch: dict[str, Tensor]) -> tuple[PlanReport, int]:
    """The report of x @ gathered(w), whose gather is on the group ``g``, and the peak of its memory."""
    joint = Joint()
    result = joint(aten.mm.default, joint["x"], joint.gathered())
    gradient = joint(aten.slice.Tensor, joint(aten.mm.default, joint["t"], joint["x"]), 0, 0, 2)
    partitioned = joint.split(result, gradient)
    costs = CostModel(hardware=ROUND, groups=groups)
    report = with_predictions(EMPTY, captured(Sum(), batch, training=False), partitioned, costs, {})
    return report, predict_step_memory(partitioned).peak_bytes


BATCH = {"x": torch.ones(4, 4)}


def test_a_step_of_known_times_has_a_peak_and_predictions():
    report, peak_bytes = _predicted({"g": GroupShape(ranks=2)}, BATCH)
    assert report.predicted_peak_bytes == peak_bytes > 0
    assert max(half.peak_memory_bytes for half in report.predictions.values()) == peak_bytes
    assert report.predictions.keys() == {"forward", "backward"} and not report.notes


def test_what_is_around_the_graphs_is_known_where_it_was_measured():
    """AdamW moves seven tensors of the size of the gradients."""
    report = replace(EMPTY, gradients_bytes=100, parameters={"a": None, "b": None})
    assert around_us(report, ROUND) is None
    measured = replace(ROUND, step_latency_us=50.0, parameter_latency_us=3.0)
    moving_us = 7 * 100 / (measured.achieved_gb_per_s * 1e3)
    assert around_us(report, measured) == pytest.approx(50 + 2 * 3 + moving_us)
    assert around_us(replace(report, gradients_bytes=0), measured) is None, "evaluation has no optimizer"


class _Control:
    """A control group of two ranks, of which the first has such a GPU."""

    def __init__(self, name: str, unlisted: str | None = None) -> None:
        self._first = name, unlisted

    def told_by_first(self, own: tuple[str, str | None]) -> tuple[str, str | None]:
        return self._first


@pytest.mark.parametrize(("backend", "name"), [("gloo", "cpu"), ("fake", "h200"), ("nccl", "h200")])
def test_hardware_is_that_of_rank_0(backend: str, name: str):
    assert hardware_of_devices(backend, _Control("h200"), pytest.fail) == name


def test_a_gpu_that_no_table_has_is_named():
    warnings: list[str] = []
    assert hardware_of_devices("nccl", _Control("h100", "NVIDIA L40S"), warnings.append) == "h100"
    (warning,) = warnings
    assert "NVIDIA L40S" in warning and "calibrate" in warning


def test_an_unknown_time_leaves_memory_known():
    report, peak_bytes = _predicted({}, BATCH)
    assert report.predicted_peak_bytes == peak_bytes
    assert not report.predictions
    (note,) = report.notes
    assert note.startswith("no predicted times: ") and "process group 'g'" in note


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"x": torch.ones(4, 6, dtype=torch.int64), "y": torch.ones(4, dtype=torch.int64)}, 24),
        ({"x": torch.ones(4, 6, dtype=torch.int32)}, 24),
        ({"pixels": torch.ones(4, 3, 8, 8, dtype=torch.uint8), "y": torch.ones(4, dtype=torch.int64)}, None),
        ({"gray": torch.ones(4, 64, dtype=torch.uint8)}, None),
        ({"volume": torch.ones(4, 3, 2, dtype=torch.int64)}, None),
        ({"x": torch.ones(4, 6), "mask": torch.ones(4, 6, dtype=torch.bool)}, None),
    ],
    ids=["tokens", "int32", "images", "bytes", "three dims", "floats and a mask"],
)
def test_tokens_are_matrices_of_indices(batch: dict[str, Tensor], tokens: int | None):
    report, _ = _predicted({}, batch)
    assert (report.samples, report.tokens) == (4, tokens)


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_what_is_stored_is_what_the_rank_with_most_keeps(plan: str, fake_mesh) -> None:
    """As the shards are made: of 5 rows the first of 4 ranks has 2, of a number each has all of it."""
    module = nn.Linear(8, 5)
    module.scale = nn.Parameter(torch.ones(()))
    mesh = fake_mesh(dp_shard=4)
    graph = captured(module, torch.ones(8, 8), lambda x: (module(x) * module.scale).square().mean(), shards=4)
    made = make_plan(graph, plan, mesh, print)
    layouts = parameter_layouts(module, mesh.mesh_of(made.axes), made.axes, made.parameters)
    most = {name: 4.0 * layout.shard_of(getattr(module, name)).numel() for name, layout in layouts.items()}
    assert stored_bytes(graph, made) == most
    assert most["weight"] == (5 if plan == "ddp" else 2) * 8 * 4
