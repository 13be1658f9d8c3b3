"""Hooks that write into parts of weights, or draw numbers for them: the weights change as on one device."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from tests.semantics.base import Case


class _Writes(Case):
    """Another way of writing after each step: hooks switch to whole weights one by one."""

    writes: ClassVar[tuple[str, ...]] = ()
    keeps = ("totals",)
    strategy_options: ClassVar[dict[str, str]] = {"plan": "fsdp"}

    def __init__(self):
        super().__init__()
        self.steps, self.totals = len(self.writes), []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        weight, bias = self.net[0].weight, self.net[0].bias
        getattr(self, self.writes[batch_idx])(weight, bias)
        with torch.no_grad():
            self.totals = [float(parameter.sum()) for parameter in self.net.parameters()]


class RowsWritten(_Writes):
    quick = pair = True
    writes = ("set_row", "fill_row", "scale_rows", "row_of_index", "data_of_row", "set_element")

    def set_row(self, weight: Tensor, bias: Tensor) -> None:
        weight.data[5] = 0

    def fill_row(self, weight: Tensor, bias: Tensor) -> None:
        weight.data[4].fill_(0.25)
        weight.data[0].mul_(0.5)

    @torch.no_grad()
    def scale_rows(self, weight: Tensor, bias: Tensor) -> None:
        weight[2:5].mul_(0.5)

    @torch.no_grad()
    def row_of_index(self, weight: Tensor, bias: Tensor) -> None:
        weight[-1] = 0.5
        weight[:2] = weight[3:5]

    @torch.no_grad()
    def data_of_row(self, weight: Tensor, bias: Tensor) -> None:
        weight[3].data.zero_()

    def set_element(self, weight: Tensor, bias: Tensor) -> None:
        bias.data[2] = 0.5


class PartsWritten(_Writes):
    """By functions that show several parts, or parts of another dim."""

    writes = ("by_chunk", "by_unbind", "by_split", "by_narrow", "by_column", "by_diagonal", "by_transposed", "by_mask")

    def by_chunk(self, weight: Tensor, bias: Tensor) -> None:
        weight.data.chunk(3)[1].zero_()

    def by_unbind(self, weight: Tensor, bias: Tensor) -> None:
        for i, row in enumerate(weight.data):
            row.mul_(1.0 + 0.1 * i)

    def by_split(self, weight: Tensor, bias: Tensor) -> None:
        weight.detach().split([1, 5])[1].add_(0.1)

    @torch.no_grad()
    def by_narrow(self, weight: Tensor, bias: Tensor) -> None:
        weight.narrow(0, 1, 3).copy_(weight.flip(0)[:3])
        self.net[2].bias.select(0, 2).fill_(0.1)

    @torch.no_grad()
    def by_column(self, weight: Tensor, bias: Tensor) -> None:
        weight[:, 1] = 0.5
        weight.select(1, 2).mul_(0.5)

    @torch.no_grad()
    def by_diagonal(self, weight: Tensor, bias: Tensor) -> None:
        weight.diagonal().add_(0.1)
        weight.fill_diagonal_(0.2)

    @torch.no_grad()
    def by_transposed(self, weight: Tensor, bias: Tensor) -> None:
        weight.t()[1].zero_()
        weight.T[:, 2].fill_(0.3)

    @torch.no_grad()
    def by_mask(self, weight: Tensor, bias: Tensor) -> None:
        weight[weight.abs() < 0.1] = 0.0


class WrittenAroundUpdates(Case):
    """Before and after the optimizer steps, and when its rate is set."""

    strategy_options: ClassVar[dict[str, str]] = {"plan": "fsdp"}

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.net[0].weight.data[2:4].mul_(0.9)
        optimizer.step(closure=optimizer_closure)
        with torch.no_grad():
            self.net[0].weight[5] = 0.0
            self.net[2].weight.add_(torch.randn_like(self.net[2].weight), alpha=0.1)

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()
        self.net[2].bias.data[1:].fill_(0.1)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]


class GradientsWritten(Case):
    """Rows of gradients, which the optimizer then steps with."""

    strategy_options: ClassVar[dict[str, str]] = {"plan": "fsdp"}

    def on_after_backward(self):
        self.net[0].weight.grad[5] = 0

    def on_before_optimizer_step(self, optimizer):
        self.net[0].weight.grad[1:3].mul_(0.5)


class GradientsWrittenInBackward(Case):
    """By the module's own `backward`, which hooks have nothing to do with."""

    pair = True
    strategy_options: ClassVar[dict[str, str]] = {"plan": "fsdp"}

    def backward(self, loss, *args, **kwargs):
        loss.backward()
        self.net[0].weight.grad[:3].mul_(0.1)
        self.net[0].weight.grad.data[5].zero_()
        self.net[2].weight.grad[1] = 0.5


class Drawn(Case):
    """The numbers of one device, which no two rows have alike."""

    strategy_options: ClassVar[dict[str, str]] = {"plan": "fsdp"}
    quick = True

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 0:
            self.net[0].reset_parameters()
        elif batch_idx == 1:
            nn.init.xavier_normal_(self.net[0].weight)
            nn.init.constant_(self.net[0].bias, 0.1)
        else:
            for parameter in self.net.parameters():
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)

    def on_train_epoch_end(self):
        self.net[2].weight.data.normal_(std=0.1)
