"""What a case is made of: a LightningModule, its global batches, and how a rank's rows are taken from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

ROWS = 4
STEPS = 3


class Step(LightningModule):
    """A network as anyone would wrap it: a loss of the batch, logged, and one optimizer."""

    def __init__(
        self,
        net: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        optimizer: str = "sgd",
        rate: float | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.loss, self.optimizer, self.rate = loss, optimizer, rate

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.net, batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=self.rate or 1e-3, eps=1e-5)
        return torch.optim.SGD(parameters, lr=self.rate or 1e-2, momentum=0.9)


def rows_of(batch: Any, rank: int, shards: int) -> Any:
    """A rank's rows of every tensor in nested dicts, lists and tuples."""
    if isinstance(batch, Tensor):
        return batch.chunk(shards)[rank] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {name: rows_of(value, rank, shards) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(rows_of(value, rank, shards) for value in batch)
    return batch


def items_of(batch: list[Any], rank: int, shards: int) -> list[Any]:
    """A rank's items of a list of samples."""
    each = len(batch) // shards
    return batch[rank * each : (rank + 1) * each]


@dataclass(frozen=True, kw_only=True)
class Built:
    """A module and the global batches of its training; `rows` makes a rank's batch of a global one."""

    module: LightningModule
    batches: list[Any]
    rows: Callable[[Any, int, int], Any] = rows_of


Builder = Callable[[], Built]


def generator() -> torch.Generator:
    """The one that draws a case's batches."""
    return torch.Generator().manual_seed(1)


def without_dropout(net: nn.Module) -> nn.Module:
    """The network with every dropout's rate at 0, which ranks would draw otherwise than one device."""
    for module in net.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return net


def stirred(net: nn.Module) -> nn.Module:
    """The network with small values in the matrices that begin as zeros, which would leave what is below them still."""
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.1)
    return net


def images(classes: int = 5, size: int = 32, channels: int = 3, rows: int = 2 * ROWS) -> list[tuple[Tensor, Tensor]]:
    """Batches of images and labels."""
    random = generator()
    return [
        (
            torch.randn(rows, channels, size, size, generator=random),
            torch.randint(0, classes, (rows,), generator=random),
        )
        for _ in range(STEPS)
    ]


def tokens(vocabulary: int = 50, length: int = 10, rows: int = ROWS) -> list[Tensor]:
    """Batches of token ids; the first ids, which padding and the like often have, are left out."""
    random = generator()
    return [torch.randint(4, vocabulary, (rows, length), generator=random) for _ in range(STEPS)]
