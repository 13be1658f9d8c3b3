"""A sample batch, taken without consuming it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_autoparallel.torch_compat.tree import tree_map


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Starting a DataLoader draws its workers' seed and a shuffle: training must not see that."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def _is_consumed_by_reading(source: Any) -> bool:
    """Whether a second iterator would go on where the first one stopped."""
    dataset = source.dataset if isinstance(source, DataLoader) else None
    return any(hasattr(item, "__next__") for item in (source, dataset) if item is not None)


def sample_training_batch(trainer: Trainer) -> tuple[bool, Any]:
    """The first batch as ``training_step`` will see it, and whether there is one that can be looked at.

    An iterator that hands out each batch once is left alone: its first real batch will do.
    """
    trainer.fit_loop.setup_data()
    loaders = trainer.train_dataloader
    if loaders is None:
        return False, None
    leaves: list[Any] = []
    tree_map(leaves.append, loaders)
    if any(_is_consumed_by_reading(loader) for loader in leaves):
        return False, None
    try:
        with _random_state_kept():
            batch = tree_map(lambda loader: next(iter(loader)), loaders)
    except StopIteration:
        return False, None
    return True, _as_step_sees_it(trainer, batch)


def _as_step_sees_it(trainer: Trainer, batch: Any) -> Any:
    module = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module.on_before_batch_transfer(batch, 0)
    batch = module.transfer_batch_to_device(batch, trainer.strategy.root_device, 0)
    return module.on_after_batch_transfer(batch, 0)
