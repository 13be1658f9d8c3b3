"""What hooks see of checkpoints, and when: ``on_save_checkpoint``, ``on_load_checkpoint`` and what follows them."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_autoparallel.errors import AutoParallelError
from tests.distributed.jobs import MESH, Net, make_strategy, make_trainer
from tests.numerics.training import full
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

HALF, ALL = 3, 6
FOLDER = {"save_distributed_checkpoint": True}


class Saves(Callback):
    """Saves while parameters lie in shards."""

    def __init__(self, path: str | None) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.path is not None and trainer.global_step == HALF:
            trainer.save_checkpoint(self.path)


class Run(Net):
    """One batch again and again: which one Lightning resumes with is not the question here."""

    steps = ALL

    def batches(self) -> list[Any]:
        return super().batches()[:1] * self.steps

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02, eps=1e-4)


def fit(
    kind: type[Run],
    mesh: Mapping[str, int] | None,
    save_to: str | None = None,
    resume_from: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Tensor], Any]:
    """Parameters after `ALL` steps on `mesh`, or after those that are left, and what the module has found."""
    torch.manual_seed(0)
    module = kind()
    if resume_from is not None:
        for parameter in module.parameters():
            nn.init.constant_(parameter, 0.3)  # what is not restored in time will show
    strategy = make_strategy(mesh, {"plan": "fsdp", **(options or {})}) if mesh else None
    trainer = make_trainer(strategy, 2 if mesh else 1, max_steps=ALL, max_epochs=-1, callbacks=[Saves(save_to)])

    def loader() -> Any:
        return module.loader(strategy.mesh.data_parallel_rank, 2) if strategy else module.loader(0, 1)

    module.train_dataloader = loader
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, ckpt_path=resume_from)
    return {name: full(parameter) for name, parameter in module.named_parameters()}, module.extra()


class TakesAway(Run):
    """Saves no weights of a teacher, and keeps what it can read of the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 6).requires_grad_(False)
        self.found: dict[str, Any] = {}

    def loss(self, batch: Any) -> Tensor:
        return super().loss((self.teacher(batch[0]), batch[1]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["teacher.weight"]
        (optimizer,) = checkpoint["optimizer_states"]
        self.found = {
            "groups": [group["params"] for group in optimizer["param_groups"]],
            "moments": {number: kept["exp_avg"].clone() for number, kept in optimizer["state"].items()},
            "weights": {name: tensor.clone() for name, tensor in checkpoint["state_dict"].items()},
            "versions": dict(checkpoint["state_dict"]._metadata),
        }

    def extra(self) -> Any:
        return self.found


@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=str)
def test_hooks_find_whole_checkpoints_on_every_rank(options: dict[str, Any], worlds: Worlds, tmp_path: Path) -> None:
    ours, plain = str(tmp_path / "ours.ckpt"), str(tmp_path / "plain.ckpt")
    _, expected = fit(TakesAway, None, plain)
    versions = expected.pop("versions")
    for _, found in worlds(2).run(fit, TakesAway, MESH, ours, None, options):
        assert found.pop("versions") == versions
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    names = [list(torch.load(path, weights_only=True)["state_dict"]) for path in (plain, ours)]
    assert names[0] == names[1]
    assert "teacher.weight" not in names[0]


class Adapted(Run):
    """Has a ``state_dict`` of its own, as adapters do: a plain dict of what trains."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 6).requires_grad_(False)
        self.strict_loading = False

    def loss(self, batch: Any) -> Tensor:
        return super().loss((self.teacher(batch[0]), batch[1]))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict(*args, **kwargs).items() if "teacher" not in key}


class Renamed(Run):
    """Its checkpoints have names of its own, and a tensor that is no parameter."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        own = super().state_dict(*args, **kwargs)
        return {f"network{name.removeprefix('net')}": value for name, value in own.items()} | {"seen": torch.ones(3)}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        assert torch.equal(state["seen"], torch.ones(3))
        own = {f"net{name.removeprefix('network')}": value for name, value in state.items() if name != "seen"}
        return super().load_state_dict(own, *args, **kwargs)


class AdaptedAndSeen(Adapted):
    found: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = {name: tensor.clone() for name, tensor in checkpoint["state_dict"].items()}

    def extra(self) -> Any:
        return self.found


WRITTEN = [(kind, options) for kind in (AdaptedAndSeen, Adapted) for options in ({}, {"async_save": True}, FOLDER)]


@pytest.mark.parametrize("options", [{}, FOLDER], ids=["file", "folder"])
def test_names_of_ones_own(options: dict[str, Any], worlds: Worlds, tmp_path: Path) -> None:
    ours, plain = str(tmp_path / "ours.ckpt"), str(tmp_path / "plain.ckpt")
    fit(Renamed, None, plain)
    worlds(2).run(fit, Renamed, MESH, ours, None, options)
    resumed, _ = fit(Renamed, None, None, plain)
    for parameters, _ in worlds(2).run(fit, Renamed, MESH, None, ours, options):
        torch.testing.assert_close(parameters, resumed, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("kind", "options"), tiered(WRITTEN, [WRITTEN[0], WRITTEN[-1]].__contains__))
def test_a_state_dict_of_ones_own(kind: type[Run], options: dict[str, Any], worlds: Worlds, tmp_path: Path) -> None:
    ours, plain = str(tmp_path / "ours.ckpt"), str(tmp_path / "plain.ckpt")
    _, expected = fit(kind, None, plain)
    for _, found in worlds(2).run(fit, kind, MESH, ours, None, options):
        if options != FOLDER:  # of which hooks see shards
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    if options != FOLDER:
        saved, of_one = (torch.load(path, weights_only=False)["state_dict"] for path in (ours, plain))
        torch.testing.assert_close(saved, of_one, rtol=1e-3, atol=1e-5)
    resumed, _ = fit(kind, None, None, plain)
    for parameters, _ in worlds(2).run(fit, kind, MESH, None, ours, options):
        torch.testing.assert_close(parameters, resumed, rtol=1e-3, atol=1e-5)


class Lookahead(torch.optim.SGD):
    """Clones weights when it is made, and pulls them back to what they were; the clones are in no checkpoint."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for parameter, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                parameter.lerp_(slow, 0.2)
        return loss


class LooksAhead(Run):
    def configure_optimizers(self) -> Any:
        return Lookahead(self.parameters())


class GroupsOfCheckpoint(Run):
    """Which groups there are follows what ``on_load_checkpoint`` restores."""

    stage = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.stage == 0:
            self.stage = 1
            self.trainer.optimizers[0].add_param_group({"params": list(self.net[0].parameters()), "lr": 0.05})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["stage"] = self.stage

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.stage = checkpoint["stage"]

    def configure_optimizers(self) -> Any:
        groups = [{"params": list(self.net[2].parameters())}]
        if self.stage:
            groups.append({"params": list(self.net[0].parameters()), "lr": 0.05})
        return torch.optim.AdamW(groups, lr=0.02, eps=1e-4)


class HeadOfCheckpoint(Run):
    """Makes its head as large as the checkpoint's."""

    classes = 3

    def __init__(self) -> None:
        super().__init__()
        self.net[2] = nn.Linear(10, self.classes)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        classes = checkpoint["state_dict"]["net.2.weight"].shape[0]
        if classes != self.classes:
            self.net[2] = nn.Linear(10, classes)


class SmallHead(HeadOfCheckpoint):
    classes = 2


RESUMED: list[Any] = [
    (LooksAhead, LooksAhead, {}),
    (LooksAhead, LooksAhead, FOLDER),
    (GroupsOfCheckpoint, GroupsOfCheckpoint, {}),
    (GroupsOfCheckpoint, GroupsOfCheckpoint, FOLDER),
    (HeadOfCheckpoint, SmallHead, {}),
]


@pytest.mark.parametrize(("first", "second", "options"), RESUMED)
def test_a_checkpoint_is_there_when_optimizers_are_made(
    first: type[Run], second: type[Run], options: dict[str, Any], worlds: Worlds, tmp_path: Path
) -> None:
    ours, plain = str(tmp_path / "ours.ckpt"), str(tmp_path / "plain.ckpt")
    fit(first, None, plain)
    expected, _ = fit(second, None, None, plain)
    worlds(2).run(fit, first, MESH, ours, None, options)
    for found, _ in worlds(2).run(fit, second, MESH, None, ours, options):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class HeadOfRank(SmallHead):
    """Rank 1 makes no head."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            super().on_load_checkpoint(checkpoint)


def error_of(kind: type[Run], path: str) -> str:
    try:
        fit(kind, MESH, None, path)
    except AutoParallelError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_layers_that_some_ranks_make(worlds: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "plain.ckpt")
    fit(HeadOfCheckpoint, None, path)
    first, second = worlds(2).run(error_of, HeadOfRank, path)
    assert first.startswith("ConfigError: on_load_checkpoint has made the parameters ['net.2.weight', 'net.2.bias'] on")
    assert second.startswith("ConfigError: on_load_checkpoint has made the parameters none on this rank")


class ChangesLoaded(Run):
    """Loads other values than were saved: half of a weight, a new bias, and nothing for another one."""

    strict_loading = False

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        state["net.0.weight"].mul_(0.5)
        state["net.2.bias"] = torch.tensor([0.1, 0.2, 0.3])
        del state["net.0.bias"]
        assert float(self.net[0].weight.max()) == pytest.approx(0.3)  # nothing is loaded yet


class TakesLoadedAway(Run):
    """Of a model that takes all or nothing."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["state_dict"]["net.0.bias"]


@pytest.mark.parametrize("options", [{}, FOLDER])
def test_what_is_loaded_is_what_hooks_leave(options: dict[str, Any], worlds: Worlds, tmp_path: Path) -> None:
    ours, plain = str(tmp_path / "ours.ckpt"), str(tmp_path / "plain.ckpt")
    fit(Run, None, plain)
    expected, _ = fit(ChangesLoaded, None, None, plain)
    worlds(2).run(fit, Run, MESH, ours, None, options)
    for found, _ in worlds(2).run(fit, ChangesLoaded, MESH, None, ours, options):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for error in worlds(2).run(error_of, TakesLoadedAway, ours):
        assert error.startswith("CheckpointError: the checkpoint does not fit the model") and "net.0.bias" in error


class GivenModule(Run):
    """Has a module among its hyperparameters, as a backbone that is made outside."""

    def __init__(self, backbone: nn.Module | None = None) -> None:
        super().__init__()
        if backbone is None:
            backbone = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 6).requires_grad_(False))
        self.backbone = backbone
        self.save_hyperparameters({"backbone": backbone})

    def loss(self, batch: Any) -> Tensor:
        return super().loss((self.backbone(batch[0]), batch[1]))


def module_in(path: Path) -> nn.Module:
    """The module among the hyperparameters, in a file or a folder."""
    saved = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=False)
    return saved["hyper_parameters"]["backbone"]


@pytest.mark.parametrize("options", [{}, FOLDER, {"async_save": True}], ids=str)
def test_a_module_among_hyperparameters(options: dict[str, Any], worlds: Worlds, tmp_path: Path) -> None:
    ours, plain = tmp_path / "ours.ckpt", tmp_path / "plain.ckpt"
    fit(GivenModule, None, str(plain))
    worlds(2).run(fit, GivenModule, MESH, str(ours), None, options)
    found, expected = module_in(ours), module_in(plain)
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)
    kinds = [
        {name: (type(p), p.requires_grad) for name, p in module.named_parameters()} for module in (found, expected)
    ]
    assert kinds[0] == kinds[1]
    torch.save(found, file := io.BytesIO())
    assert b"lightning_autoparallel" not in file.getvalue()  # a process without us loads it
    if ours.is_file():
        again = GivenModule.load_from_checkpoint(ours, weights_only=False)
        weights = torch.load(ours, weights_only=False)["state_dict"]
        torch.testing.assert_close(again.state_dict(), weights, rtol=0, atol=0)
