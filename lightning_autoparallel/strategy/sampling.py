"""A sample batch, for planning a step that does not run; a training is captured at its first real batch."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sized
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader

from lightning_autoparallel.lightning_compat import Trainer
from lightning_autoparallel.torch_compat.tree import tree_map


@contextlib.contextmanager
def _random_state_kept(loaders: list[Any]) -> Iterator[None]:
    """Starting a DataLoader draws its workers' seed and a shuffle: what comes after planning must not see that."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    generators = [generator for loader in loaders for generator in _generators(loader)]
    states = [generator.get_state() for generator in generators]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers draw from."""
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    owners = [loader, *samplers, *(getattr(sampler, "sampler", None) for sampler in samplers)]
    found = [getattr(owner, "generator", None) for owner in owners]
    return [generator for generator in found if isinstance(generator, torch.Generator)]


def _has_batches_left(source: Any) -> bool:
    """Whether a batch of it can be had that is not missing afterwards, as far as that shows."""
    if hasattr(source, "load_state_dict"):  # it keeps where it is
        return False
    dataset = source.dataset if isinstance(source, DataLoader) else None
    return not any(hasattr(item, "__next__") for item in (source, dataset) if item is not None)


_EMPTY: Any = object()
_LOADERS = {
    "training_step": "train_dataloader",
    "validation_step": "val_dataloaders",
    "test_step": "test_dataloaders",
    "predict_step": "predict_dataloaders",
}


def rows_of_batches(trainer: Trainer, step: str, index: int) -> int | None:
    """How many rows the first of one rank's batches for a step has; None where no single loader says so."""
    loaders = getattr(trainer, _LOADERS[step])
    loader = loaders[index] if isinstance(loaders, (list, tuple)) and index < len(loaders) else loaders
    if not isinstance(loader, DataLoader):
        return None
    rows = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(rows, int) or rows == 1:  # one item, which may be a batch already
        return None
    return min(rows, len(loader.sampler)) if isinstance(loader.sampler, Sized) else rows


def sample_training_batch(trainer: Trainer) -> tuple[bool, Any]:
    """The first batch as ``training_step`` would see it, and whether there is one that can be looked at."""
    trainer.fit_loop.setup_data()
    return _sample(trainer, trainer.train_dataloader)


def sample_validation_batch(trainer: Trainer) -> tuple[bool, Any]:
    """The first batch of the first dataloader as ``validation_step`` would see it, and whether there is one."""
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.setup_data()
    trainer.training = True
    loaders = trainer.val_dataloaders
    return _sample(trainer, loaders[0] if isinstance(loaders, list) and loaders else loaders)


def _sample(trainer: Trainer, loaders: Any) -> tuple[bool, Any]:
    if loaders is None:
        return False, None
    leaves: list[Any] = []
    tree_map(leaves.append, loaders)
    if not all(map(_has_batches_left, leaves)):
        return False, None
    with _random_state_kept(leaves):
        first = {id(loader): next(iter(loader), _EMPTY) for loader in leaves}
    if any(batch is _EMPTY for batch in first.values()):
        return False, None
    batch = tree_map(lambda loader: first[id(loader)], loaders)
    return True, _as_step_sees_it(trainer, batch)


def _as_step_sees_it(trainer: Trainer, batch: Any) -> Any:
    module = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module.on_before_batch_transfer(batch, 0)
    batch = module.transfer_batch_to_device(batch, trainer.strategy.root_device, 0)
    return module.on_after_batch_transfer(batch, 0)
