"""One rank is one device: the same order of rows, drawn from the same random state, and the same tuners."""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from tests.distributed.jobs import make_strategy, make_trainer
from tests.numerics.training import full
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance

REFUSED = "not supported with distributed strategies"


class Shuffled(LightningModule):
    """Shuffled rows, as many at once as a tuner says."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))
        self.batch_size = 2

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator)
        return DataLoader(TensorDataset(*rows), batch_size=self.batch_size, shuffle=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def seeded(ours: bool) -> dict[str, Any]:
    """A training from one seed, drawn from since by the weights, then by the order of each epoch."""
    try:
        seed_everything(3, verbose=False)
        module = Shuffled()
        trainer = make_trainer(strategy_of(1) if ours else None, 1, max_epochs=2, use_distributed_sampler=True)
        trainer.fit(module)
    finally:
        os.environ.pop("PL_GLOBAL_SEED", None)
    assert isinstance(trainer.train_dataloader.sampler, RandomSampler)
    return {name: full(parameter).clone() for name, parameter in module.named_parameters()}


def strategy_of(ranks: int) -> Any:
    return make_strategy({"dp_shard": ranks}, {"capture": "step"})


def test_rows_come_in_the_order_of_one_device(worlds: Worlds) -> None:
    (seen,) = worlds(1).run(seeded, True)
    torch.testing.assert_close(seen, seeded(False), rtol=1e-5, atol=1e-6)


def found(ranks: int | None, as_callback: bool) -> tuple[Any, ...]:
    """What the batch size finder finds, or says, and how many steps follow."""
    torch.manual_seed(0)
    module = Shuffled()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = [BatchSizeFinder(max_trials=3, steps_per_trial=2)] if as_callback else []
        strategy = strategy_of(ranks) if ranks else None
        options = {"max_epochs": 1, "use_distributed_sampler": True, "default_root_dir": folder}
        trainer = make_trainer(strategy, ranks or 1, callbacks=callbacks, **options)
        try:
            if not as_callback:
                Tuner(trainer).scale_batch_size(module, max_trials=3, steps_per_trial=2)
            trainer.fit(module)
        except Exception as error:
            return str(error), 0
    return module.batch_size, trainer.global_step


@pytest.mark.parametrize("as_callback", tiered([False, True], lambda as_callback: as_callback))
def test_batch_sizes_are_found_on_one_rank(as_callback: bool, worlds: Worlds) -> None:
    expected = found(None, as_callback)
    assert expected == (8, 6)
    assert worlds(1).run(found, 1, as_callback) == [expected]


def test_lightning_refuses_to_find_them_on_several(worlds: Worlds) -> None:
    for said, steps in worlds(2).run(found, 2, False):
        assert REFUSED in said and steps == 0
