"""Activation-checkpoint regions that change something, which torch runs again in the backward: it is changed twice."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.semantics.base import FORWARD, Case


class _Norm(Case):
    """Statistics of a batch norm are compared."""

    modes = FORWARD
    keeps: ClassVar[tuple[str, ...]] = ("norm.running_mean", "norm.num_batches_tracked")
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        x.requires_grad_(self.reentrant)
        return F.cross_entropy(self.net(checkpoint(self.norm, x, use_reentrant=self.reentrant)), y)


class NormInRegion(_Norm):
    """In a region of the step."""

    quick = pair = True


class NormInReentrantRegion(_Norm):
    """In one of the older kind."""

    reentrant = True
    leaves_unused = False


class _Checkpointed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.norm, x, use_reentrant=False)


class NormInModulesRegion(_Norm):
    """In one that a module of the step opens."""

    names_line = False

    def __init__(self) -> None:
        super().__init__()
        self.block = _Checkpointed(self.norm)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(self.block(x)), y)


class _Observed(nn.Module):
    """Keeps a sum of what it has computed, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0
        self.register_buffer("sums", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.linear(x).tanh()
        self.sums.add_(hidden.detach().sum(0))
        return hidden


class ObservedInRegion(Case):
    """What comes behind the last tensor that is saved, torch's second run leaves out."""

    modes = FORWARD
    keeps: ClassVar[tuple[str, ...]] = ("observed.sums", "observed.calls")
    quick = True

    def __init__(self) -> None:
        super().__init__()
        self.observed = _Observed()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(checkpoint(self.observed, x, use_reentrant=False)), y)


class ObservedTwice(ObservedInRegion):
    """Out of a region, where its module is captured, and in one, on what lies alike."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((self.observed(self.observed(x)), y), batch_idx)


class CountsInRegion(Case):
    """A number."""

    modes = FORWARD
    keeps: ClassVar[tuple[str, ...]] = ("calls", "seen")

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []

    def hidden(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net[:2](x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net[2](checkpoint(self.hidden, x, use_reentrant=False)), y)


class AppendsInRegion(CountsInRegion):
    """A list."""

    def hidden(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return self.net[:2](x)


class CountsTwice(CountsInRegion):
    """Before the region, too."""

    def training_step(self, batch, batch_idx):
        self.calls += 1
        return super().training_step(batch, batch_idx)


class AddsUpInRegion(CountsInRegion):
    """A tensor that is no buffer, as an attribute."""

    keeps: ClassVar[tuple[str, ...]] = ("total", "totals")

    def __init__(self) -> None:
        super().__init__()
        self.total, self.totals = torch.zeros(()), {"all": torch.zeros(())}

    def hidden(self, x: Tensor) -> Tensor:
        hidden = self.net[:2](x)
        self.add(hidden.detach().sum())
        return hidden * 1.0

    def add(self, value: Tensor) -> None:
        self.total = self.total + value


class AddsUpEntriesInRegion(AddsUpInRegion):
    """As an entry of a dict."""

    def add(self, value: Tensor) -> None:
        self.totals["all"] = self.totals["all"] + value


class KeepsInRegion(CountsInRegion):
    """The same tensor both times, as who looks at attention keeps it; a norm that evaluates changes nothing."""

    modes: ClassVar[tuple[str, ...]] = ("step",)
    keeps: ClassVar[tuple[str, ...]] = ("last",)

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(())
        self.norm = nn.BatchNorm1d(4).eval()

    def on_train_epoch_start(self) -> None:
        self.norm.eval()

    def hidden(self, x: Tensor) -> Tensor:
        hidden = self.net[:2](self.norm(x))
        self.last = hidden.detach().sum(1)
        return hidden
