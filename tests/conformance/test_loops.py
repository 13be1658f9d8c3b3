"""Lightning's loops: the same calls of a Trainer, the same hooks at the same steps, the same results."""

from __future__ import annotations

import multiprocessing
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, TensorDataset

from tests.distributed.jobs import Losses, make_strategy, make_trainer
from tests.numerics.training import full
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance

SIZE = 4  # rows of a global batch


class Net(LightningModule):
    """Logs by step and by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Named(Net):
    """Takes batches of two loaders at once."""

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch["a"]) + super().loss(batch["b"])

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))


class Reshapes(Net):
    """Views what it is given in another shape."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x.reshape(-1, 3).reshape(-1, 6)), y)


class StopsEpochs(Net):
    """Ends each epoch, and the training in its second."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None

    def on_train_epoch_end(self):
        self.trainer.should_stop = self.current_epoch == 1


class Trace(Callback):
    """Which hooks were called, and when."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []


def _traced(name: str) -> Callable[..., None]:
    def hook(self: Trace, trainer: Trainer, *_: Any, **__: Any) -> None:
        self.calls.append((name, trainer.global_step, trainer.current_epoch))

    return hook


for _name in [name for name in dir(Callback) if name.startswith("on_") and "checkpoint" not in name]:
    setattr(Trace, _name, _traced(_name))


def _rows(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator))


class Stream(IterableDataset):
    """This rank's rows, without a length."""

    def __init__(self, rows: Dataset, rank: int, ranks: int) -> None:
        self.rows, self.rank, self.ranks = rows, rank, ranks

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[i] for i in range(self.rank, len(self.rows), self.ranks))  # type: ignore[arg-type]


class HandsOutOnce:
    """A loader whose batches come once: it counts them."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches, self.given = batches, 0

    def __iter__(self) -> HandsOutOnce:
        self.iterator = iter(self.batches)
        return self

    def __next__(self) -> Any:
        self.given += 1
        return next(self.iterator)


@dataclass
class Env:
    """One side: alone (`ranks` is None) or one rank of ours."""

    ranks: int | None
    module: LightningModule
    in_order: bool = False  # whether there is a single rank, which trains on rows as they come

    def __post_init__(self) -> None:
        self.losses, self.trace, self.extra = Losses(), Trace(), None

    def trainer(self, **options: Any) -> Trainer:
        strategy = make_strategy({"dp_shard": self.ranks}, {}) if self.ranks else None
        self.overfits = bool(options.get("overfit_batches"))
        chosen = {"max_epochs": 2, "use_distributed_sampler": True, "callbacks": [self.trace, self.losses], **options}
        return make_trainer(strategy, self.ranks or 1, **chosen)

    @property
    def rank(self) -> int:
        return dist.get_rank() if self.ranks else 0

    def train(self, rows: int = 16, seed: int = 0) -> DataLoader:
        """Lightning shuffles what several ranks train on; one device is given the same order."""
        data = _rows(rows, seed)
        if self.ranks or self.overfits or self.in_order:
            return DataLoader(data, batch_size=SIZE // (self.ranks or 1))
        return DataLoader(data, batch_size=SIZE, sampler=DistributedSampler(data, 1, 0, shuffle=True))

    def val(self, rows: int = 8, seed: int = 1) -> DataLoader:
        return DataLoader(_rows(rows, seed), batch_size=SIZE // (self.ranks or 1))

    def stream(self, rows: int, seed: int) -> DataLoader:
        return DataLoader(Stream(_rows(rows, seed), self.rank, self.ranks or 1), batch_size=SIZE // (self.ranks or 1))


def every_loop(env: Env) -> Trainer:
    trainer = env.trainer(max_epochs=1)
    trainer.validate(env.module, env.val(), verbose=False)
    trainer.fit(env.module, env.train(), env.val())
    trainer.test(env.module, env.val(), verbose=False)
    trainer.predict(env.module, env.val())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(env.module, env.train(), env.val())
    trainer.validate(env.module, env.val(), verbose=False)
    return trainer


def fitted(make_loaders: Callable[[Env], tuple[Any, ...]], **options: Any) -> Callable[[Env], Trainer]:
    def run(env: Env) -> Trainer:
        trainer = env.trainer(**options)
        trainer.fit(env.module, *make_loaders(env))
        return trainer

    return run


def once(env: Env) -> Trainer:
    trainer = env.trainer(use_distributed_sampler=False)
    loader = HandsOutOnce([tuple(part[env.rank :: env.ranks or 1] for part in batch) for batch in _batches()])
    trainer.fit(env.module, loader)
    env.extra = loader.given
    return trainer


def strided(env: Env) -> Trainer:
    ranks = env.ranks or 1
    wide = [(F.pad(x, (1, 1)).chunk(ranks)[env.rank], y.chunk(ranks)[env.rank]) for x, y in _batches()]
    trainer = env.trainer(use_distributed_sampler=False)
    trainer.fit(env.module, DataLoader([(x[:, 1:-1], y) for x, y in wide], batch_size=None))
    return trainer


def _batches() -> list[Any]:
    return list(DataLoader(_rows(16, 0), batch_size=SIZE))


def reloaded(env: Env) -> Trainer:
    made: list[int] = []

    def loader() -> DataLoader:
        made.append(len(made))
        return env.train(seed=made[-1])

    env.module.train_dataloader = loader
    trainer = env.trainer(max_epochs=4, reload_dataloaders_every_n_epochs=2)
    trainer.fit(env.module)
    env.extra = made
    return trainer


class Prepares(Net):
    """Makes in a hook what its loaders read, and notes what is asked for when."""

    def prepared(self, env: Env) -> Net:
        self.env, self.asked = env, []
        return self

    def on_fit_start(self):
        self.seed = 3

    def train_dataloader(self):
        self.asked.append(("train", self.trainer.state.stage, self.current_epoch))
        return self.env.train(seed=self.seed + self.current_epoch)

    def val_dataloader(self):
        self.asked.append(("val", self.trainer.state.stage, self.current_epoch))
        return self.env.val()


def prepared(env: Env) -> Trainer:
    env.extra = env.module.prepared(env).asked
    trainer = env.trainer(num_sanity_val_steps=1)
    trainer.fit(env.module)
    return trainer


def resumed_reload(env: Env) -> Trainer:
    """Two epochs of the data of epoch 0, then, resumed, three of that of epoch 2."""
    env.extra = env.module.prepared(env).asked
    with tempfile.TemporaryDirectory() as folder:
        path = dist_folder(folder, env) + "/at.ckpt"
        first = env.trainer(max_epochs=2)
        first.fit(env.module)
        first.save_checkpoint(path)
        trainer = env.trainer(max_epochs=5, reload_dataloaders_every_n_epochs=3)
        trainer.fit(env.module, ckpt_path=path)
    return trainer


def dist_folder(folder: str, env: Env) -> str:
    """The folder of rank 0."""
    folders = [folder]
    if env.ranks:
        dist.broadcast_object_list(folders)
    return folders[0]


class Data(LightningDataModule):
    """Changes batches on their way."""

    def __init__(self, env: Env) -> None:
        super().__init__()
        self.env = env

    def train_dataloader(self):
        return self.env.train()

    def val_dataloader(self):
        return self.env.val()

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * 2, batch[1]


def with_data_module(env: Env) -> Trainer:
    trainer = env.trainer()
    trainer.fit(env.module, datamodule=Data(env))
    return trainer


class Turns(Sampler):
    """Begins at another row each time that it is read."""

    def __init__(self, rows: int) -> None:
        self.rows, self.readings = rows, 0

    def __iter__(self) -> Iterator[int]:
        self.readings += 1
        return iter([(row + 3 * self.readings) % self.rows for row in range(self.rows)])

    def __len__(self) -> int:
        return self.rows


def kept_workers(env: Env) -> Trainer:
    """Workers are those of the loader's only iterator; a sampler knows how often it was read."""
    batches = _batches()
    parts = [tuple(part.chunk(env.ranks or 1)[env.rank] for part in batch) for batch in batches]
    options = {"batch_size": None, "sampler": Turns(len(parts)), "num_workers": 1, "persistent_workers": True}
    trainer = env.trainer(use_distributed_sampler=False)
    # ranks of our worlds are daemons, to which multiprocessing gives no children
    with mock.patch.dict(vars(multiprocessing.current_process())["_config"], daemon=False):
        trainer.fit(env.module, DataLoader(parts, **options))
    return trainer


def both(env: Env) -> tuple[Any, ...]:
    return env.train(), env.val()


RUNS: dict[str, Callable[[Env], Trainer]] = {
    "every loop": every_loop,
    "sanity, two loaders": fitted(lambda env: (env.train(), [env.val(), env.val(12, 2)]), num_sanity_val_steps=2),
    "limits": fitted(both, limit_train_batches=0.5, limit_val_batches=1, num_sanity_val_steps=-1),
    "val_check_interval": fitted(both, val_check_interval=2),
    "a part of an epoch": fitted(both, val_check_interval=0.25),
    "across epochs": fitted(both, max_epochs=3, check_val_every_n_epoch=None, val_check_interval=3),
    "every second epoch": fitted(both, max_epochs=3, check_val_every_n_epoch=2),
    "overfit_batches": fitted(both, overfit_batches=2),
    "fast_dev_run": fitted(both, fast_dev_run=2),
    "without length": fitted(
        lambda env: (env.stream(16, 0), env.stream(8, 1)), max_steps=6, max_epochs=-1, val_check_interval=2,
        check_val_every_n_epoch=None,
    ),
    "handed out once": once,
    "strided batches": strided,
    "smaller last": fitted(lambda env: (env.train(14), env.val(6))),
    "uneven validation": fitted(lambda env: (env.train(), env.val(9)), num_sanity_val_steps=-1),
    "accumulation": fitted(lambda env: (env.train(),), accumulate_grad_batches=3),
    "data module": with_data_module,
    "reloaded": reloaded,
    "prepared": prepared,
    "resumed, reloaded": resumed_reload,
    "workers that are kept": kept_workers,
    "no training batches": fitted(both, limit_train_batches=0),
    "no epochs": fitted(both, max_epochs=0),
    "at once, uneven": fitted(
        lambda env: (
            CombinedLoader({"a": env.train(), "b": env.train(8, 3)}, "max_size_cycle"),
            CombinedLoader({"a": env.val(16), "b": env.val(8, 2)}, "min_size"),
        )
    ),
    "stopped": fitted(both, max_epochs=4),
}  # fmt: skip
MODULES: dict[str, type[LightningModule]] = {
    "at once, uneven": Named,
    "stopped": StopsEpochs,
    "strided batches": Reshapes,
    "prepared": Prepares,
    "resumed, reloaded": Prepares,
}


def run(name: str, ranks: int | None, in_order: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    env = Env(ranks, MODULES.get(name, Net)(), in_order)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = RUNS[name](env)
    return {
        "losses": env.losses.values,
        "logged": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "parameters": {key: full(value) for key, value in env.module.named_parameters()},
        "calls": env.trace.calls,
        "extra": env.extra,
        "at": (trainer.global_step, trainer.current_epoch),
    }


CASES = [(name, ranks) for name in RUNS for ranks in (1, 2)]
IN_DEFAULT = ("every loop", "strided batches", "handed out once", "prepared", "workers that are kept")


@pytest.mark.parametrize(("name", "ranks"), tiered(CASES, lambda case: case[1] == 2 and case[0] in IN_DEFAULT))
def test_loops_are_those_of_one_device(name: str, ranks: int, worlds: Worlds) -> None:
    expected = run(name, None, ranks == 1)
    for seen in worlds(ranks).run(run, name, ranks):
        for exact in ("calls", "extra", "at"):
            assert seen.pop(exact) == expected[exact]
        torch.testing.assert_close(seen, {key: expected[key] for key in seen}, rtol=1e-5, atol=1e-6)


class Remembers:
    """A loader that knows where it is, and goes on from there."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.at = batches, 0

    def __iter__(self) -> Iterator[Any]:
        self.at %= len(self.batches)
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]

    def __len__(self) -> int:
        return len(self.batches)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class SavesAt(Callback):
    """Saves in the middle of the first epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def run_in_parts(path: str, ranks: int | None, resumes: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    env = Env(ranks, Net())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = [env.losses, env.trace, *([] if resumes else [SavesAt(path)])]
        trainer = env.trainer(use_distributed_sampler=False, callbacks=callbacks)
        parts = [tuple(part.chunk(ranks or 1)[env.rank] for part in batch) for batch in _batches()]
        trainer.fit(env.module, Remembers(parts), ckpt_path=path if resumes else None)
    parameters = {key: full(value) for key, value in env.module.named_parameters()}
    return {"losses": env.losses.values, "parameters": parameters, "at": float(trainer.global_step)}


@pytest.mark.parametrize("ranks", tiered([1, 2], lambda ranks: ranks == 2))
def test_a_run_goes_on_in_the_middle_of_an_epoch(ranks: int, worlds: Worlds, tmp_path: Path) -> None:
    ours, alone = str(tmp_path / "ours.ckpt"), str(tmp_path / "alone.ckpt")
    whole = run_in_parts(alone, None, False)
    expected = run_in_parts(alone, None, True)
    worlds(ranks).run(run_in_parts, ours, ranks, False)
    for seen in worlds(ranks).run(run_in_parts, ours, ranks, True):
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(seen["parameters"], whole["parameters"], rtol=1e-5, atol=1e-6)
