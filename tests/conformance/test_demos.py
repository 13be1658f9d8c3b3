"""Lightning's demo modules, their steps as they are, beside Lightning's DDP: the same weights and predictions after."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.demos.lstm import LightningLSTM
from lightning.pytorch.demos.transformer import LightningTransformer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.jobs import make_strategy, make_trainer
from tests.numerics.training import full
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance

VOCABULARY = 50


class OfTokens(LightningModule):
    """On numbers in the place of a text from the net; without dropout, whose masks would differ."""

    def prepare_data(self) -> None:
        """Nothing is fetched."""

    def setup(self, stage: str) -> None:
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, (nn.LSTM, nn.MultiheadAttention)):
                module.dropout = 0.0

    def train_dataloader(self) -> DataLoader:
        tokens = torch.randint(0, VOCABULARY, (16, 13), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:].contiguous()), batch_size=2)


class TransformerDemo(OfTokens, LightningTransformer):
    """Makes its positions in the first step."""


class LstmDemo(OfTokens, LightningLSTM):
    """Keeps what is hidden from step to step."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(kind: type[LightningModule], ranks: int, ours: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    module = kind(vocab_size=VOCABULARY) if issubclass(kind, OfTokens) else kind()
    # one rank of DDP shuffles rows that one device takes in order
    theirs: Any = DDPStrategy() if ranks > 1 else "auto"
    strategy: Any = make_strategy({"dp_shard": ranks}, {}) if ours else theirs
    seen: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # some steps of the transformer enlarge the rounding, which in float64 stays far below the tolerance
        trainer = make_trainer(
            strategy, ranks, limit_train_batches=4, use_distributed_sampler=True, precision="64-true"
        )
        trainer.fit(module)
        seen["steps"] = float(trainer.global_step)
        if isinstance(module, BoringModel):
            trainer.validate(module, verbose=False)
            trainer.test(module, verbose=False)
            seen["predicted"] = torch.cat(trainer.predict(module))
    return {"parameters": {name: full(parameter) for name, parameter in module.named_parameters()}, **seen}


BORING, TOKENS = (BoringModel, ManualOptimBoringModel), (TransformerDemo, LstmDemo)
CASES = [
    *((kind, ranks) for kind in BORING for ranks in (1, 2, 4)),
    *((kind, ranks) for kind in TOKENS for ranks in (1, 2)),
]


@pytest.mark.parametrize(("kind", "ranks"), tiered(CASES, lambda case: case == (ManualOptimBoringModel, 2)))
def test_demos_train_as_on_one_device_or_under_ddp(kind: type[LightningModule], ranks: int, worlds: Worlds) -> None:
    expected = worlds(ranks).run(run, kind, ranks, False)
    for seen, by_ddp in zip(worlds(ranks).run(run, kind, ranks, True), expected, strict=True):
        torch.testing.assert_close(seen, by_ddp, rtol=1e-9, atol=1e-11)
