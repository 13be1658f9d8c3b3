"""``mesh="auto"``: which meshes are tried, how they are ranked, and that each is planned as if it had been given."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn

from lightning_autoparallel import AutoParallelStrategy, plan
from lightning_autoparallel.artifacts import ArtifactWriter
from lightning_autoparallel.config import MeshSpec, PlanSpec
from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.errors import AutoParallelError, CaptureError, ConfigError, InfeasiblePlanError
from lightning_autoparallel.plan import read_plan
from lightning_autoparallel.strategy.mesh_search import MOST_SPLITS, meshes, other_splits, search

BATCH = (torch.zeros(4, 64), torch.zeros(4, 64))


class Net(LightningModule):
    """A wide multilayer perceptron; two of its products are cut well by tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 1024), nn.Linear(1024, 64)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self.down(self.up(x).relu()), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def planned(mesh: Any, module: LightningModule | None = None, **options: Any) -> PlanReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan(
            module or Net(), BATCH, mesh, **{"world_size": 8, "ranks_per_node": 4, "hardware": "h100", **options}
        )


def axes(*args: Any) -> list[dict[str, int]]:
    return [dict(mesh.axes) for mesh in meshes(*args)]


def test_auto_may_use_every_axis() -> None:
    assert axes(PlanSpec.parse("auto"), 8, 4) == [
        {"dp_shard": 8},
        {"dp_replicate": 2, "dp_shard": 4},
        {"dp_shard": 4, "tp": 2},
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
        {"dp_shard": 2, "tp": 4},
    ]


def test_a_plan_gets_no_axis_that_it_leaves_idle() -> None:
    assert axes(PlanSpec.parse("fsdp"), 8, 4) == [{"dp_shard": 8}]
    assert axes(PlanSpec.parse("hsdp"), 8, 4) == [{"dp_shard": 8}, {"dp_replicate": 2, "dp_shard": 4}]
    ruled = PlanSpec.parse({"base": "fsdp", "rules": {"up.weight": {"tp": "S(0)"}}})
    assert axes(ruled, 8, 4) == [{"dp_shard": 8}, {"dp_shard": 4, "tp": 2}, {"dp_shard": 2, "tp": 4}]


def test_one_rank_has_one_mesh() -> None:
    assert axes(PlanSpec.parse("auto"), 1, 8) == [{"dp_shard": 1}]


def others(plan: str, ranks_per_node: int, **mesh: int) -> list[dict[str, int]]:
    found = other_splits(PlanSpec.parse(plan), ranks_per_node, MeshSpec(axes=tuple(mesh.items())))
    return [dict(each.axes) for each in found]


def test_the_ranks_of_the_best_mesh_are_shared_out_otherwise_too() -> None:
    """The split by nodes has been tried: those nearest to it come first."""
    assert others("auto", 4, dp_shard=16) == [
        {"dp_replicate": 8, "dp_shard": 2},
        {"dp_replicate": 2, "dp_shard": 8},
    ]
    inner = {"tp": 2}
    assert others("auto", 4, dp_replicate=4, dp_shard=2, **inner) == [{"dp_replicate": 2, "dp_shard": 4, **inner}]
    assert len(others("hsdp", 8, dp_shard=2**12)) == MOST_SPLITS
    assert others("fsdp", 4, dp_shard=16) == others("auto", 4, dp_shard=2, tp=4) == others("auto", 8, tp=8) == []


def test_each_mesh_is_planned_as_if_it_had_been_given() -> None:
    report = planned("auto", plan="auto")
    tried = [dict(trial.mesh) for trial in report.meshes]
    nodes = axes(PlanSpec.parse("auto"), 8, 4)
    first = next(mesh for mesh in tried if mesh in nodes)
    more = [mesh for mesh in others("auto", 4, **first) if mesh not in nodes]
    assert sorted(map(str, tried)) == sorted(map(str, [*nodes, *more]))
    for trial in report.meshes:
        alone = planned(dict(trial.mesh), plan="auto")
        assert trial.step_time_us == pytest.approx(alone.step_time_us)
        assert trial.samples == alone.samples
        assert trial.us_per_sample == pytest.approx((alone.step_time_us + alone.update_us) / alone.samples)
    per_sample = [trial.us_per_sample for trial in report.meshes]
    assert per_sample == sorted(per_sample) and len(set(per_sample)) > 1
    assert dict(report.mesh) == dict(report.meshes[0].mesh)


def test_a_global_batch_is_reached_by_whole_micro_batches() -> None:
    report = planned("auto", plan="auto", global_batch_size=24)
    fits = {tuple(trial.mesh.items()): trial.accumulation for trial in report.meshes if trial.fits}
    # 4 rows on each data-parallel rank: 8 x 4 rows are more than 24, 4 x 4 do not divide it, 2 x 4 do.
    assert fits == {(("dp_shard", 2), ("tp", 4)): 3}
    assert dict(report.mesh) == {"dp_shard": 2, "tp": 4}
    reasons = {trial.samples: trial.why_not for trial in report.meshes if not trial.fits}
    assert "more than 24" in reasons[32] and "no multiple of the 16" in reasons[16]


def test_a_mesh_that_misses_the_global_batch_is_not_planned() -> None:
    """Each data-parallel rank takes as many rows as on the first mesh."""
    report, asked = planned({"dp_shard": 8}, plan="auto"), []

    def plan_on(mesh: MeshSpec) -> PlanReport:
        asked.append(dict(mesh.axes))
        return replace(report, samples=4 * dict(mesh.axes)["dp_shard"])

    candidates = [MeshSpec(axes=(("dp_shard", 8 // tp), ("tp", tp))) for tp in (1, 2, 4)]
    found = search(candidates, plan_on, global_batch_size=24, budget_gib=None)
    assert asked == [{"dp_shard": 8, "tp": 1}, {"dp_shard": 2, "tp": 4}]
    assert {trial.samples: trial.fits for trial in found.meshes or ()} == {32: False, 16: False, 8: True}


def test_micro_batches_of_a_global_batch_add_up() -> None:
    """A mesh that must take several has their gradients in memory too."""
    once, thrice = (planned("auto", plan="auto", global_batch_size=rows) for rows in (8, 24))
    assert dict(once.mesh) == dict(thrice.mesh) == {"dp_shard": 2, "tp": 4}
    alone = planned(dict(thrice.mesh), plan="auto", accumulate_grad_batches=3)
    assert thrice.training_peak_bytes == alone.training_peak_bytes
    assert thrice.training_peak_bytes is not None and once.training_peak_bytes is not None
    assert thrice.training_peak_bytes > once.training_peak_bytes
    (taken,) = [trial.taken_bytes for trial in thrice.meshes if trial.fits]
    assert taken == thrice.training_peak_bytes


def test_what_is_dumped_is_of_the_best_mesh(tmp_path: Path) -> None:
    with mock.patch.object(ArtifactWriter, "record", autospec=True, side_effect=ArtifactWriter.record) as written:
        report = planned("auto", plan="auto", dump_dir=str(tmp_path))
    assert [call.args[1] for call in written.call_args_list].count("training_step/plan") == 1
    assert read_plan(tmp_path / "training_step" / "plan.json")["mesh"] == dict(report.mesh)
    assert len(report.meshes) > 1


def test_a_mesh_whose_optimizer_takes_long_comes_later() -> None:
    """Sharded parameters are updated sooner, and once for several micro-batches."""
    slow = {"base": "h100", "optimizer_gb_per_s": 1e-3}
    sizes: list[dict[str, int]] = [{"dp_replicate": 8}, {"dp_shard": 8}]
    whole, parts = (planned(mesh, plan="hsdp", hardware=slow) for mesh in sizes)
    assert whole.update_us == pytest.approx(8 * parts.update_us, rel=0.05)
    reports = {MeshSpec.from_mapping(mesh): one for mesh, one in zip(sizes, (whole, parts), strict=True)}
    found = search(list(reports), reports.__getitem__, None, None)
    assert dict(found.meshes[0].mesh) == {"dp_shard": 8} and whole.step_time_us < parts.step_time_us
    several = search(list(reports), reports.__getitem__, 64, None).meshes
    assert several == search(list(reports), reports.__getitem__, None, None, accumulation=2).meshes
    for one, two in zip(found.meshes, several, strict=True):
        report = reports[MeshSpec.from_mapping(one.mesh)]
        assert two.accumulation == 2
        assert one.us_per_sample - two.us_per_sample == pytest.approx(report.update_us / 2 / 32)


def test_where_nothing_fits_every_mesh_says_why() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"no mesh of these ranks.*\{dp_shard: 8\}: takes .* may use 1e-05"):
        planned("auto", plan="fsdp", memory_budget_gib=1e-5)


def test_without_times_nothing_is_ranked() -> None:
    with pytest.raises(ConfigError, match="ranks meshes by predicted time"):
        planned("auto", Unpriced(), plan="ddp")


def test_what_no_mesh_can_capture_ends_the_search() -> None:
    with pytest.raises(CaptureError):
        planned("auto", Branches(), plan="fsdp")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": {"dp_shard": 8}, "global_batch_size": 8}, "one is given"),
        ({"mesh": "auto", "global_batch_size": 0}, "at least 1"),
        ({"mesh": "fastest"}, "names no axes"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(**options)


def test_a_training_is_told_to_plan_first() -> None:
    with pytest.raises(AutoParallelError, match=r"plan --strategy\.mesh auto"):
        AutoParallelStrategy(mesh="auto")


class Unpriced(Net):
    """Its step multiplies complex matrices, of which no hardware's peak is known."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        product = self.down.weight.to(torch.complex64) @ self.up.weight.to(torch.complex64)
        return super().training_step(batch, batch_idx) + product.real.sum()


class Branches(Net):
    """Its step asks for a value."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if loss.item() > 0 else loss
