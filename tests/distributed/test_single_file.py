"""One file with whole tensors: a run saved with us goes on without us, and the other way round."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_autoparallel.checkpoint import BackgroundWriter
from lightning_autoparallel.errors import AutoParallelError
from tests.distributed.jobs import MESH, Losses, Net, make_strategy, make_trainer
from tests.numerics.training import full
from tests.support.worlds import Worlds

HALF, ALL = 6, 12
TENSOR_PARALLEL = {"dp_shard": 2, "tp": 2}
RULES = {
    "net.0.weight": {"tp": "S(0)"},
    "net.0.bias": {"tp": "S(0)"},
    "net.2.weight": {"tp": "S(1)"},
}


class Resumed(Net):
    """Even and uneven shards, a tied and a frozen parameter, a buffer, AdamW and a learning rate that moves."""

    steps = 3

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 7, bias=False))
        self.again = nn.Linear(width, 7, bias=False)
        self.again.weight = self.net[2].weight
        self.uneven = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def batches(self):
        """One batch again and again: which one Lightning resumes with is not the question here."""
        return super().batches()[:1] * self.steps

    def training_step(self, batch, batch_idx):
        self.seen += 1
        x, y = batch
        hidden = self.net[1](self.net[0](x))
        scores = self.uneven(torch.tanh(self.net[2](hidden) + self.again(hidden)) * self.frozen)
        return nn.functional.cross_entropy(scores * self.scale, y)

    def test_step(self, batch, batch_idx):
        self.log("test", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        parameters = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=0.02, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Saves(Callback):
    """Saves after the first step, while parameters lie in shards: after ``fit`` they are whole again."""

    def __init__(self, *paths: str) -> None:
        self.paths, self.seen = paths, []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            for path in self.paths:
                self.save(trainer, path)

    def save(self, trainer: Any, path: str) -> None:
        trainer.save_checkpoint(path)


def start(mesh: Mapping[str, int] | None, steps: int, one_file: bool, **options: Any) -> tuple[Resumed, Any, Losses]:
    torch.manual_seed(0)
    module, losses = Resumed(**options), Losses()
    plan = {"base": "fsdp", "rules": RULES} if mesh and "tp" in mesh else "fsdp"
    chosen = {"plan": plan, "save_distributed_checkpoint": not one_file}
    strategy = make_strategy(mesh, chosen) if mesh else None
    size = 1
    for axis in (mesh or {}).values():
        size *= axis
    trainer = make_trainer(strategy, size, max_steps=steps, max_epochs=-1, callbacks=[losses])

    def loader() -> Any:
        data_parallel = (strategy.mesh.data_parallel_rank, strategy.mesh.data_parallel_size) if strategy else (0, 1)
        return module.loader(*data_parallel)

    module.train_dataloader = module.test_dataloader = loader
    return module, trainer, losses


def fit(
    mesh: Mapping[str, int] | None, steps: int, save_to: str | None, resume_from: str | None, one_file: bool = True
) -> dict[str, Any]:
    """Train to step `steps` on `mesh`, or without us, from a checkpoint or from the start."""
    module, trainer, losses = start(mesh, steps, one_file)
    if resume_from is not None:
        for parameter in module.parameters():
            torch.nn.init.constant_(parameter, 0.3)  # what is not restored will show
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, ckpt_path=resume_from, weights_only=False)
        if save_to is not None:
            trainer.save_checkpoint(save_to)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        "losses": losses.values,
        "state": {name: full(tensor) for name, tensor in state.items()},
        "global_step": trainer.global_step,
        "lr": trainer.lr_scheduler_configs[0].scheduler.get_last_lr(),
    }


def run(worlds: Worlds, mesh: Mapping[str, int] | None, *args: Any) -> dict[str, Any]:
    """`fit` where it belongs: in this process without a mesh, or in a world, all of whose ranks must agree."""
    if mesh is None:
        return fit(None, *args)
    first, *others = worlds(4 if len(mesh) == 2 else 2).run(fit, mesh, *args)
    for other in others:
        assert other["losses"] == first["losses"]
        torch.testing.assert_close(other["state"], first["state"], rtol=0, atol=0)
    return first


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (MESH, None),
        (None, MESH),
        (MESH, MESH),
        pytest.param(MESH, {"dp_replicate": 2, "dp_shard": 2}, marks=pytest.mark.matrix),
        (TENSOR_PARALLEL, None),
        (None, TENSOR_PARALLEL),
    ],
    ids=lambda mesh: "x".join(mesh) if mesh else "one device",
)
def test_a_run_goes_on_where_it_was_saved(before, after, worlds: Worlds, tmp_path: Path) -> None:
    file = str(tmp_path / "run.ckpt")
    whole = fit(None, ALL, None, None)
    first = run(worlds, before, HALF, file, None)
    second = run(worlds, after, ALL, None, file)
    assert Path(file).is_file()
    assert (first["global_step"], second["global_step"]) == (HALF, ALL)
    assert second["lr"] == whole["lr"] != first["lr"]
    torch.testing.assert_close(first["losses"] + second["losses"], whole["losses"], rtol=1e-5, atol=0)
    torch.testing.assert_close(second["state"], whole["state"], rtol=0, atol=1e-5)


def shape_of(value: Any) -> Any:
    """What a checkpoint is made of: keys, types, and the geometry of tensors."""
    if isinstance(value, Mapping):
        return {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [shape_of(item) for item in value]
    if isinstance(value, Tensor):
        return type(value), tuple(value.shape), value.dtype, value.device.type, value.is_contiguous()
    return type(value)


def test_the_file_is_made_as_one_device_makes_it(worlds: Worlds, tmp_path: Path) -> None:
    ours, plain = str(tmp_path / "ours.ckpt"), str(tmp_path / "plain.ckpt")
    fit(None, HALF, plain, None)
    worlds(2).run(fit, MESH, HALF, ours, None)
    expected, found = (torch.load(path, map_location="cpu", weights_only=True) for path in (plain, ours))
    assert found.pop("autoparallel_random_state").keys() == {"seed", "draws"}
    assert shape_of(found) == shape_of(expected)
    assert found["state_dict"]._metadata == expected["state_dict"]._metadata
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=0, atol=1e-5)
    moments = [checkpoint["optimizer_states"][0]["state"] for checkpoint in (found, expected)]
    torch.testing.assert_close(*moments, rtol=1e-3, atol=1e-6)


class Looks(Callback):
    """Sees and changes what is saved, as one does who saves averages in the place of weights."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.seen = shape_of({key: checkpoint[key] for key in ("state_dict", "optimizer_states")})
        for tensor in checkpoint["state_dict"].values():
            tensor.add_(1)


def saves_with_a_hook(mesh: Mapping[str, int] | None, plain: str, hooked: str, on_all: bool = True) -> Any:
    module, trainer, _ = start(mesh, 1, True)
    looks = Looks()

    class First(Saves):
        def save(self, trainer: Any, path: str) -> None:
            super().save(trainer, path)
            if on_all or trainer.is_global_zero:
                trainer.callbacks.append(looks)

    trainer.callbacks.append(First(plain, hooked))
    trainer.fit(module)
    return getattr(looks, "seen", None)


def test_a_hook_of_one_rank_is_one_of_all(worlds: Worlds, tmp_path: Path) -> None:
    """Ranks agree on who looks: one that gathers would wait for one that does not."""
    plain, hooked = str(tmp_path / "plain.ckpt"), str(tmp_path / "hooked.ckpt")
    seen, nothing = worlds(2).run(saves_with_a_hook, MESH, plain, hooked, False)
    assert seen["state_dict"].keys() and nothing is None
    before, after = (torch.load(path, weights_only=True)["state_dict"] for path in (plain, hooked))
    torch.testing.assert_close(after["net.0.weight"], before["net.0.weight"] + 1)


def saves_in_fit(mesh: Mapping[str, int] | None, path: str, options: Mapping[str, Any]) -> list[str]:
    """What lies in shards while it is saved."""
    module, trainer, _ = start(mesh, HALF, True)
    if mesh is not None:
        trainer.strategy._writer = BackgroundWriter(timedelta(minutes=1)) if options.get("async_save") else None
    trainer.callbacks.append(keeps := Keeps())
    trainer.callbacks.append(Saves(path))
    trainer.fit(module)
    return keeps.sharded


class Keeps(Callback):
    """Has a parameter and a tensor that needs gradients in its state."""

    sharded: ClassVar[list[str]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.module = pl_module

    def state_dict(self) -> dict[str, Any]:
        named = dict(self.module.named_parameters())
        self.sharded = [name for name, parameter in named.items() if isinstance(parameter, DTensor)]
        return {"parameter": nn.Parameter(torch.ones(2)), "tensor": torch.ones(2, requires_grad=True)}


@pytest.mark.parametrize("in_background", [False, True])
def test_a_file_that_is_saved_while_parameters_lie_in_shards(in_background, worlds: Worlds, tmp_path: Path) -> None:
    ours, plain = str(tmp_path / "ours.ckpt"), str(tmp_path / "plain.ckpt")
    saves_in_fit(None, plain, {})
    sharded, _ = worlds(2).run(saves_in_fit, MESH, ours, {"async_save": in_background})
    assert "net.0.weight" in sharded
    expected, found = (torch.load(path, map_location="cpu", weights_only=False) for path in (plain, ours))
    assert found.pop("autoparallel_random_state").keys() == {"seed", "draws"}
    assert shape_of(found) == shape_of(expected)
    assert found["state_dict"]._metadata == expected["state_dict"]._metadata
    state, kept = found["state_dict"], found["callbacks"]["Keeps"]
    assert state["again.weight"].data_ptr() == state["net.2.weight"].data_ptr()  # tied, and written once
    assert isinstance(kept["parameter"], nn.Parameter) and kept["tensor"].requires_grad
    torch.testing.assert_close(state, expected["state_dict"], rtol=0, atol=1e-5)
    moments = [checkpoint["optimizer_states"][0]["state"] for checkpoint in (found, expected)]
    torch.testing.assert_close(*moments, rtol=1e-3, atol=1e-6)


def test_hooks_see_what_one_device_has(worlds: Worlds, tmp_path: Path) -> None:
    expected = saves_with_a_hook(None, str(tmp_path / "a"), str(tmp_path / "b"))
    plain, hooked = str(tmp_path / "plain.ckpt"), str(tmp_path / "hooked.ckpt")
    seen, _ = worlds(2).run(saves_with_a_hook, MESH, plain, hooked)
    assert seen == expected
    before, after = (torch.load(path, weights_only=True)["state_dict"] for path in (plain, hooked))
    for name, tensor in before.items():
        # in a hook's hands tied weights are two tensors, each of which is changed once
        torch.testing.assert_close(after[name], tensor + 1)


def both_kinds(file: str, folder: str) -> tuple[float, float, float]:
    """The test loss of a run saved as a file and as a folder, tested by strategies that would save the other kind."""
    fit(MESH, HALF, file, None)
    fit(MESH, HALF, folder, None, False)
    tested = []
    for path, one_file in ((file, False), (folder, True), (None, True)):
        module, trainer, _ = start(MESH, 1, one_file)
        (metrics,) = trainer.test(module, ckpt_path=path, verbose=False, weights_only=False)
        tested.append(metrics["test"])
    return tuple(tested)


def test_both_kinds_are_loaded_whatever_is_saved(worlds: Worlds, tmp_path: Path) -> None:
    for file, folder, untrained in worlds(2).run(both_kinds, str(tmp_path / "file"), str(tmp_path / "folder")):
        assert file == folder != untrained
    assert (tmp_path / "file").is_file()
    assert (tmp_path / "folder").is_dir()


def error_of(mesh: Mapping[str, int], save_to: str | None, resume_from: str | None, width: int) -> str:
    module, trainer, _ = start(mesh, 1, True, width=width)
    try:
        trainer.fit(module, ckpt_path=resume_from, weights_only=False)
        trainer.save_checkpoint(save_to)
    except AutoParallelError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_what_does_not_fit(worlds: Worlds, tmp_path: Path) -> None:
    file, folder = str(tmp_path / "file"), str(tmp_path / "folder")
    Path(folder).mkdir()
    fit(None, 1, file, None)
    for text in worlds(2).run(error_of, MESH, None, file, 10):
        assert text.startswith("CheckpointError: the checkpoint does not fit the model: ")
        assert "size mismatch for net.0.weight: copying a param with shape torch.Size([8, 6])" in text
    for text in worlds(2).run(error_of, MESH, folder, None, 8):
        said = text.replace("rank 0 has failed: ", "")  # which the others are told
        assert said == f"CheckpointError: {folder} is a folder, not a file: remove it or choose another name"


def saves_hyperparameters(path: str) -> None:
    """With a container of omegaconf, which has metadata of its own."""
    module, trainer, _ = start(MESH, 1, True)
    module.save_hyperparameters(OmegaConf.create({"rate": 0.5, "sizes": [1, 2]}))
    trainer.callbacks.append(Saves(path))
    trainer.fit(module)


def test_containers_of_omegaconf(worlds: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "file.ckpt")
    worlds(2).run(saves_hyperparameters, path)
    found = torch.load(path, weights_only=False)["hyper_parameters"]
    assert found == {"rate": 0.5, "sizes": [1, 2]}
    assert isinstance(found, DictConfig)
