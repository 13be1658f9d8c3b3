"""Ranks whose rows lead them to other modules, parameters or terms of the loss."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.semantics.base import Case


class AuxiliaryOnSomeRanks(Case):
    """A term of the loss that a rank leaves out where its rows say so, after it has computed it."""

    pair = True

    def __init__(self):
        super().__init__()
        self.aux = nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        hidden = self.net(batch[0])
        term = self.aux(hidden).pow(2).mean()
        loss = F.cross_entropy(hidden, batch[1])
        return loss + term if float(batch[0][0, 0]) > 0 else loss


class OrderByValue(Case):
    """Two heads, in the order that a rank's rows say."""

    pair = True

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def training_step(self, batch, batch_idx):
        x, y = batch
        order = [0, 1] if float(x[0, 0]) > 0 else [1, 0]
        outputs = {i: self.heads[i](x) for i in order}
        return F.cross_entropy(outputs[0] - outputs[1].tanh(), y) + self.loss(batch)


class ParameterOnSomeRanks(Case):
    """A parameter of the step's own that some ranks' rows leave out, at some steps all of them."""

    pair = True

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        if float(x[0, 0]) > 0:
            logits = logits * self.scale
        if float(x[1, 1]) > 0.5:
            logits = logits + self.shift @ torch.eye(3)
        return F.cross_entropy(logits, y)


class GradientOfParameter(Case):
    """How large the gradient of one layer is, asked of autograd within the step."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x) * self.scale, y)
        (gradient,) = torch.autograd.grad(loss, [self.scale], retain_graph=True)
        return loss * (1 + float(gradient.norm() > 0))


class LoggedByAll(Case):
    """A layer that some ranks' rows lead to, and then a number that all ranks join."""

    pair = True

    def __init__(self):
        super().__init__()
        self.aux = nn.Linear(3, 2)

    def branch(self, batch, loss):
        if float(batch[0][0, 0]) > 0:
            loss = loss + self.aux(self.net(batch[0])).pow(2).mean()
        return loss

    def training_step(self, batch, batch_idx):
        loss = self.branch(batch, self.loss(batch))
        self.log("joined", loss, sync_dist=True)
        return loss


class GatheredByAll(LoggedByAll):
    """The ranks' losses are gathered, and a parameter is what some rows lead to."""

    def branch(self, batch, loss):
        return loss + self.aux.weight.pow(2).sum() if float(batch[0][0, 0]) > 0 else loss

    def training_step(self, batch, batch_idx):
        loss = self.branch(batch, self.loss(batch))
        spread = self.all_gather(loss.detach()).std()
        return loss * (1 + spread)


class SummedByAll(LoggedByAll):
    """torch.distributed itself is called behind it."""

    def training_step(self, batch, batch_idx):
        loss = self.branch(batch, self.loss(batch))
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
            dist.barrier()
        return loss * (1 + 0.1 * total)


class EvaluatedApart(LoggedByAll):
    """The same in an evaluation, batch by batch."""

    def validation_step(self, batch, batch_idx):
        loss = self.branch(batch, self.loss(batch))
        self.log("joined_val", loss, sync_dist=True, on_step=True, on_epoch=True)
