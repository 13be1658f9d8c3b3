"""`plan`: a training step planned for a fake world, without its memory, its data or a process group."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn

from lightning_autoparallel import plan
from lightning_autoparallel.cost.hardware import hardware_from
from lightning_autoparallel.errors import CaptureError, ConfigError, InfeasiblePlanError
from lightning_autoparallel.pipeline import predict
from lightning_autoparallel.strategy.fake_world import PlanningStrategy
from lightning_autoparallel.torch_compat.collectives import init_fake_world

BATCH = (torch.zeros(2, 64), torch.zeros(2, 32))


class Net(LightningModule):
    """Two layers of 64 x 64 and 32 x 64 with a bias, built where Lightning builds models."""

    width = 64

    def configure_model(self):
        self.first = nn.Linear(self.width, self.width, bias=False)
        self.second = nn.Linear(self.width, 32)

    def step(self, batch):
        x, y = batch
        return F.mse_loss(self.second(self.first(x).relu()), y)

    def training_step(self, batch, batch_idx):
        self.log("loss", loss := self.step(batch))
        return loss

    def validation_step(self, batch, batch_idx):
        assert not self.training
        self.log("val_loss", self.step(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def planned(module=None, batch=BATCH, mesh=None, world_size=8, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan(module or Net(), batch, mesh, world_size=world_size, **{"plan": "fsdp", **options})


def counts(table):
    return {kind: {axes: counted.count for axes, counted in per.items()} for kind, per in table.items()}


def test_each_weight_is_gathered_twice_and_reduced_once():
    report = planned(disabled_passes=["bucket_collectives"])
    assert report.mesh == {"dp_shard": 8}
    assert counts(report.collectives["forward"])["all_gather"] == {"dp_shard": 3}
    assert counts(report.collectives["backward"])["reduce_scatter"] == {"dp_shard": 3}
    assert set(report.timings_s) == {"capture", "plan", "apply", "passes", "predict"}
    gathered = report.collectives["forward"]["all_gather"]["dp_shard"].size_bytes
    assert gathered == 4 * (64 * 64 + 32 * 64 + 32)


def test_bytes_are_those_of_one_rank():
    report = planned()
    shard = 4 * (64 * 64 + 32 * 64 + 32) // 8
    assert (report.parameters_bytes, report.gradients_bytes, report.optimizer_bytes) == (shard, shard, 2 * shard)
    first = report.parameters["first.weight"]
    assert (first.shape, first.local_shape, first.placements) == ((64, 64), (8, 64), {"dp_shard": "S(0)"})


def test_shards_are_counted_with_their_padding():
    assert planned(world_size=24).parameters["second.bias"].local_shape == (2,)


def test_whole_parameters_under_ddp():
    report = planned(plan="ddp")
    assert report.parameters_bytes == 4 * (64 * 64 + 32 * 64 + 32)
    assert report.parameters["first.weight"].placements == {"dp_shard": "R"}


class Frozen(Net):
    def configure_model(self):
        super().configure_model()
        self.first.requires_grad_(False)


def test_frozen_parameters_have_neither_gradient_nor_optimizer_state():
    report = planned(Frozen())
    first = report.parameters["first.weight"]
    assert (first.parameter_bytes, first.gradient_bytes, first.optimizer_bytes) == (4 * 64 * 8, 0, 0)
    assert report.optimizer_bytes == 2 * report.gradients_bytes == 2 * 4 * (32 * 64 + 32) // 8


class TooLarge(Net):
    width = 2**20  # 4 TiB in one layer


def test_nothing_is_allocated():
    module = TooLarge()
    batch = (torch.zeros(1, 2**20), torch.zeros(1, 32))
    report = planned(module, batch, {"dp_replicate": 2, "dp_shard": -1}, world_size=1024, ranks_per_node=8)
    assert report.parameters["first.weight"].parameter_bytes == 2**42 // 1024
    assert all(parameter.is_meta for parameter in module.parameters())


def test_nothing_is_allocated_for_a_plan_that_is_not_there():
    module = TooLarge()
    batch = (torch.zeros(1, 2**20), torch.zeros(1, 32))
    with pytest.raises(InfeasiblePlanError, match=r"take 4.1e\+03 at the step's peak.* of first 4.1e\+03"):
        planned(module, batch, world_size=1024, plan="auto")
    assert all(parameter.is_meta for parameter in module.parameters())
    assert not dist.is_initialized()


def test_validation_is_planned_when_asked_for():
    module = Net()
    report = planned(module, inference=True)
    assert counts(report.collectives["inference"])["all_gather"] == {"dp_shard": 1}  # of three weights, in one bucket
    assert report.launches() == {"dp_shard": sum(planned().launches().values())}
    assert module.training


def test_saved_bytes_are_told_by_module():
    report = planned()
    assert sum(module.saved_bytes for module in report.modules) == report.saved_bytes > 0


class Sized(Net):
    def configure_optimizers(self):
        assert (self.trainer.world_size, self.trainer.num_nodes, self.trainer.global_rank) == (16, 4, 0)
        return super().configure_optimizers()


def test_hooks_see_the_world_that_is_planned_for():
    planned(Sized(), world_size=16, ranks_per_node=4)


class Closure(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Broken(Net):
    def configure_optimizers(self):
        raise RuntimeError("no values here")


class Foreign(Net):
    def configure_optimizers(self):
        return torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)


@pytest.mark.parametrize("name", ["fsdp", "auto"])
@pytest.mark.parametrize(
    ("module", "reason"),
    [(Closure, "a step of LBFGS"), (Broken, "no values here"), (Foreign, r"SGD holds a tensor of shape \(3,\)")],
)
def test_unknown_optimizer_state_is_no_number(module, reason, name):
    report = planned(module(), plan=name)
    assert report.optimizer_bytes is None and report.as_json()["optimizer_bytes"] is None
    (note,) = [note for note in report.notes if not note.startswith("plan auto")]
    assert re.search(reason, note)


class Reads(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * batch[0].sum().item()


def test_a_plan_that_was_found_reports_what_was_solved():
    report = planned(plan="auto")
    told = report.as_json()["solved"]
    assert set(told) == {"axis", "time_us", "bound_us", "columns", "rows", "seconds", "gap"}
    assert told["axis"] == "dp_shard" and told["columns"] > 0 and told["rows"] > 0 and told["seconds"] > 0
    assert told["gap"] == pytest.approx(max(1 - told["bound_us"] / told["time_us"], 0.0))
    (note,) = [note for note in report.notes if "columns" in note]
    assert f"{told['columns']} columns and {told['rows']} rows" in note


def test_every_call_of_both_halves_is_reported_with_its_placements():
    """Columns, then rows, as the rules say: the second product leaves a sum over tp."""
    rules = {"first.weight": {"tp": "S(0)"}, "second.weight": {"tp": "S(1)"}}
    report = planned(mesh={"dp_shard": 2, "tp": 4}, plan={"base": "fsdp", "rules": rules})
    products = [calls for calls in report.calls if calls.call.startswith("aten.mm")]
    assert [(calls.module, calls.backward, dict(calls.placements)) for calls in products] == [
        ("first", False, {"dp_shard": "S(0) from S(0), R", "tp": "S(1) from R, S(1)"}),
        ("second", False, {"dp_shard": "S(0) from S(0), R", "tp": "P(sum) from S(1), S(0)"}),
        ("second", True, {"dp_shard": "S(0) from S(0), R", "tp": "S(1) from R, S(1)"}),
        ("second", True, {"dp_shard": "P(sum) from S(1), S(0)", "tp": "S(1) from R, S(1)"}),
        ("first", True, {"dp_shard": "P(sum) from S(1), S(0)", "tp": "S(0) from S(0), R"}),
    ]
    assert report.as_json()["calls"][1]["call"].startswith("aten.mm.default (test_planning.py:")


def test_a_plan_that_was_named_has_nothing_solved():
    assert planned().as_json()["solved"] is None


def test_a_failure_leaves_no_process_group():
    with pytest.raises(CaptureError, match=r"test_planning.py:\d+ reads a tensor's value"):
        planned(Reads())
    assert not dist.is_initialized()
    assert planned().mesh == {"dp_shard": 8}


def test_a_process_group_that_exists_is_left_alone():
    init_fake_world(2)
    try:
        with pytest.raises(ConfigError, match="process group is initialised"):
            planned()
        assert dist.get_world_size() == 2
    finally:
        dist.destroy_process_group()


class Prepares(Net):
    prepared = False

    def prepare_data(self):
        Prepares.prepared = True


def test_data_are_prepared_without_waiting_for_ranks_that_are_not_there():
    assert counts(planned(Prepares()).collectives["forward"])
    assert Prepares.prepared


class ReadsWhileBuilding(Net):
    def configure_model(self):
        super().configure_model()
        self.scale = float(self.first.weight.sum())


def test_a_model_that_needs_values_to_be_built_is_refused():
    with pytest.raises(ConfigError, match="configure_model cannot run on the meta device"):
        planned(ReadsWhileBuilding())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": {"dp_shard": 3}}, r"mesh \{dp_shard: 3\} needs 3 ranks, but world_size=8"),
        ({"mesh": {"dp_replicate": 3, "dp_shard": -1}}, "needs a multiple of 3 ranks, but world_size=8"),
        ({"world_size": 12}, "world_size=12 does not fill nodes of ranks_per_node=8"),
        ({"world_size": 0}, "must both be at least 1"),
    ],
)
def test_worlds_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        planned(**options)


def test_a_second_process_of_a_launcher_is_refused(monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="this is process 1 of those that a launcher has started"):
        planned()


@pytest.mark.parametrize(("given", "nodes"), [(None, 2), (2, 1), (1, 2)])
def test_nodes_are_those_that_rates_were_measured_on(given: int | None, nodes: int) -> None:
    """Two hosts of one rank, say: what they send goes between nodes, unless others are asked for."""
    inter = {"bandwidth_gb_per_s": 1e-4, "latency_us": 1.0}
    hardware = {"base": "cpu", "ranks_per_node": 1, "inter_node": inter}
    report = planned(world_size=2, ranks_per_node=given, hardware=hardware)
    assert report.hardware["ranks_per_node"] == 2 // nodes
    sent_us = 1e6 * 64 * 64 * 4 / 2 / 1e5  # a half of the first weight at 1e-4 GB/s, once
    assert report.step_time_us is not None and (report.step_time_us > sent_us) == (nodes == 2)
    strategy = PlanningStrategy(world_size=2, ranks_per_node=given)
    strategy.predict_for(hardware)
    assert strategy.ranks_per_node == 2 // nodes
    odd = PlanningStrategy(world_size=12)  # no multiple of 8, but hardware may come
    odd.predict_for({**hardware, "ranks_per_node": 4})
    assert odd.ranks_per_node == 4


@pytest.mark.parametrize(("given", "planned_for"), [(None, "h200"), ("b200", "b200")])
def test_times_are_those_of_the_gpu_that_is_there(given: str | None, planned_for: str, monkeypatch) -> None:
    monkeypatch.setattr(predict, "detected_hardware", lambda device: hardware_from("h200"))
    assert planned(world_size=2, hardware=given).hardware["name"] == planned_for


def test_a_gpu_that_no_table_has_is_told(monkeypatch) -> None:
    monkeypatch.setattr(predict, "unlisted_gpu", lambda: "NVIDIA L40S")
    with pytest.warns(UserWarning, match="L40S is in no table of hardware, and is taken for h100"):
        plan(Net(), BATCH, world_size=2, plan="fsdp")
