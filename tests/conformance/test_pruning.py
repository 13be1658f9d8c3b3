"""ModelPruning chooses among whole parameters and trains what is left, as on one device."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from torch import nn

from tests.conformance.saved import MESHES, RULES
from tests.distributed.jobs import Losses, Net, failure, make_strategy, make_trainer
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance

STAY = {"use_lottery_ticket_hypothesis": False}
KINDS: dict[str, dict[str, Any]] = {
    "global": {"pruning_fn": "l1_unstructured", **STAY},
    "each": {"pruning_fn": "l1_unstructured", "use_global_unstructured": False, **STAY},
    "structured": {
        "pruning_fn": "ln_structured",
        "pruning_norm": 2,
        "pruning_dim": 0,
        "use_global_unstructured": False,
        **STAY,
    },
    # once: Lightning lets the weights to start again from be trained where they lie on the CPU
    "start again": {"pruning_fn": "l1_unstructured", "apply_pruning": lambda epoch: epoch == 0},
    "random": {"pruning_fn": "random_unstructured", "make_pruning_permanent": False, **STAY},
}


class Pruned(Net):
    """Some of its weights are pruned after each epoch; float64, in which no two are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()

    def batches(self):
        return [(x.double(), y) for x, y in super().batches()]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_epoch_start(self):
        torch.manual_seed(self.current_epoch)  # of what is drawn at random, which ranks draw alike


def prune(kind: str, mesh: Mapping[str, int] | None, path: str, folder: bool, capture: str = "auto") -> dict[str, Any]:
    """Three epochs, saved after each; what a pruned module has, and what its last checkpoint."""
    torch.manual_seed(0)
    module, losses = Pruned(), Losses()
    plan = "hsdp" if mesh and len(mesh) > 1 else "fsdp"
    chosen = {"save_distributed_checkpoint": folder, "plan": plan, "capture": capture}
    strategy = make_strategy(mesh, chosen) if mesh else None
    shards = (lambda: (strategy.mesh.data_parallel_rank, strategy.mesh.data_parallel_size)) if strategy else None
    module.train_dataloader = lambda: module.loader(*(shards() if shards else (0, 1)))
    weights = [(module.net[0], "weight"), (module.net[2], "weight")]
    pruning = ModelPruning(parameters_to_prune=weights, amount=0.25, **KINDS[kind])
    saves = ModelCheckpoint(path, save_last=True, save_top_k=0, every_n_epochs=1)
    options = {"max_epochs": 3, "enable_checkpointing": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(
            strategy, dist.get_world_size() if mesh else 1, callbacks=[losses, pruning, saves], **options
        )
        trainer.fit(module)
    seen = {"losses": losses.values, "state": dict(module.state_dict()), "rest": [p.shape for p in module.parameters()]}
    if not folder:
        seen["saved"] = dict(torch.load(saves.last_model_path, weights_only=False)["state_dict"])
    return seen


CASES = [(kind, mesh, folder) for kind in KINDS for mesh in ("2", "2x2") for folder in (False, True)]
DEFAULT = [("global", "2", False)]


@pytest.mark.parametrize(("kind", "mesh", "folder"), tiered(CASES, DEFAULT.__contains__))
def test_pruned_as_on_one_device(kind: str, mesh: str, folder: bool, worlds: Worlds, tmp_path: Path) -> None:
    expected = prune(kind, None, str(tmp_path / "plain"), folder)
    for found in worlds({"2": 2, "2x2": 4}[mesh]).run(
        prune, kind, MESHES[mesh], str(tmp_path / "ours"), folder, timeout_s=120
    ):
        assert found["rest"] == expected["rest"]
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-9, atol=1e-11)
        for state in ("state", "saved"):
            torch.testing.assert_close(found.get(state), expected.get(state), rtol=1e-9, atol=1e-11)


def prune_amid(mesh: Mapping[str, int] | None, plan: str = "auto") -> dict[str, Any]:
    """Pruned after a validation, while gradients are added up."""
    torch.manual_seed(0)
    module, strategy = Pruned(), make_strategy(mesh, {"plan": plan}) if mesh else None
    shards = (lambda: (strategy.mesh.data_parallel_rank, strategy.mesh.data_parallel_size)) if strategy else None
    module.train_dataloader = module.val_dataloader = lambda: module.loader(*(shards() if shards else (0, 1)))
    module.validation_step = lambda batch, batch_idx: None
    weights = [(module.net[0], "weight"), (module.net[2], "weight")]
    pruning = ModelPruning("l1_unstructured", weights, amount=0.25, prune_on_train_epoch_end=False, **STAY)
    ranks = dist.get_world_size() if mesh else 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(
            strategy, ranks, callbacks=[pruning], max_epochs=2, accumulate_grad_batches=4, val_check_interval=2
        )
        trainer.fit(module)
    return dict(module.state_dict())


@pytest.mark.parametrize("plan", ["fsdp", "auto"])
def test_gradients_that_wait_are_kept(plan: str, worlds: Worlds) -> None:
    expected = prune_amid(None)
    for found in worlds(2).run(prune_amid, MESHES["2"], plan):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def prune_and_resume(mesh: Mapping[str, int] | None, path: str) -> dict[str, Any]:
    """Resumed from what was saved after the first pruning."""
    for resume_from in (None, f"{path}/epoch=0.ckpt"):
        torch.manual_seed(0)
        module = Pruned()
        strategy = make_strategy(mesh, {"plan": "fsdp", "save_distributed_checkpoint": True}) if mesh else None
        module.train_dataloader = partial(_loader, module, strategy)
        weights = [(module.net[0], "weight"), (module.net[2], "weight")]
        pruning = ModelPruning("l1_unstructured", weights, amount=0.25, **STAY)
        saves = ModelCheckpoint(path, filename="{epoch}", save_top_k=-1)
        ranks = dist.get_world_size() if mesh else 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = make_trainer(strategy, ranks, callbacks=[pruning, saves], max_epochs=2, enable_checkpointing=True)
            trainer.fit(module, ckpt_path=resume_from)
    return dict(module.state_dict())


def _loader(module: Pruned, strategy: Any) -> Any:
    mesh = None if strategy is None else strategy.mesh
    return module.loader(*((mesh.data_parallel_rank, mesh.data_parallel_size) if mesh else (0, 1)))


def test_resumed_from_a_folder(worlds: Worlds, tmp_path: Path) -> None:
    expected = prune_and_resume(None, str(tmp_path / "plain"))
    for found in worlds(2).run(prune_and_resume, MESHES["2"], str(tmp_path / "ours")):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.matrix
def test_pruned_in_forward_mode(worlds: Worlds, tmp_path: Path) -> None:
    expected = prune("global", None, str(tmp_path / "plain"), False)
    for found in worlds(2).run(prune, "global", MESHES["2"], str(tmp_path / "ours"), False, "forward"):
        torch.testing.assert_close(found["state"], expected["state"], rtol=1e-9, atol=1e-11)


def test_some_are_pruned(tmp_path: Path) -> None:
    state = prune("global", None, str(tmp_path), False)["state"]
    weights = torch.cat([state["net.0.weight"].flatten(), state["net.2.weight"].flatten()])
    assert int((weights == 0).sum()) == 16 + 12 + 9  # a quarter of what is left, three times, of 63


class WithRules(Pruned):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": {"base": "fsdp", "rules": RULES}}

    def callbacks(self):
        return [ModelPruning("l1_unstructured", amount=0.3)]


def test_names_of_rules_are_not_changed(worlds: Worlds) -> None:
    for text, _ in worlds(2).run(failure, WithRules, MESHES["tp"]):
        assert text.startswith("ConfigError: ModelPruning renames parameters")
