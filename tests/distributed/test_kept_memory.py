"""What is kept of parameters by ``.data`` stays as it was when another tensor is assigned to that, as of plain tensors;
copies that a step makes of its modules; and collectives that change parameters or gradients in place.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.jobs import MESH, ByHand, Net, train
from tests.support.worlds import WorldError, Worlds


class Averaged(Net):
    """Moving averages take the place of parameters for a while after each batch."""

    strategy: ClassVar[dict[str, Any]] = {"plan": "fsdp"}

    def on_fit_start(self) -> None:
        self.averages = {name: p.data.clone() for name, p in self.named_parameters()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for name, p in self.named_parameters():
            self.averages[name] = (0.5 * self.averages[name] + 0.5 * p.data).clone()
        kept = {}
        for name, p in self.named_parameters():
            kept[name] = p.data
            p.data = self.averages[name]
        self.log("averaged", sum(float(p.detach().norm()) for p in self.parameters()))
        for name, p in self.named_parameters():
            p.data = kept[name]


class AveragedCopies(Averaged):
    strategy: ClassVar[dict[str, Any]] = {"plan": "ddp"}


class AveragedByHand(ByHand, Averaged):
    """In the step itself, too, which runs its own Python."""

    def loss(self, batch):
        kept = [p.data for p in self.net.parameters()]
        for p in self.net.parameters():
            p.data = p.data * 1.1
        with torch.no_grad():
            wanted = self.net(batch[0])
        for p, before in zip(self.net.parameters(), kept, strict=True):
            p.data = before
        return super().loss(batch) + (self.net(batch[0]) - wanted).pow(2).mean()


class Exchanged(Net):
    """Two networks' parameters change places, twice."""

    strategy: ClassVar[dict[str, Any]] = {"plan": "fsdp"}

    def __init__(self) -> None:
        super().__init__()
        self.other = copy.deepcopy(self.net).requires_grad_(False)

    def exchange(self) -> None:
        for p, q in zip(self.net.parameters(), self.other.parameters(), strict=True):
            kept = p.data
            p.data = q.data
            q.data = kept

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for p, q in zip(self.net.parameters(), self.other.parameters(), strict=True):
            q.data.mul_(0.9).add_(p.data, alpha=0.1)
        self.exchange()
        self.log("of_other", sum(float(p.detach().norm()) for p in self.net.parameters()))
        self.exchange()


class Copying(Net):
    """A step that runs whole until it copies its network, gradients left behind, as its teacher."""

    strategy: ClassVar[dict[str, Any]] = {"plan": "fsdp"}
    teacher: Any = None

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if batch_idx == 2:
            teacher = copy.deepcopy(self.net)
            assert all(p.grad is None for p in teacher.parameters())
            object.__setattr__(self, "teacher", teacher.requires_grad_(False))
        if self.teacher is not None:
            loss = loss + (self.net(batch[0]) - self.teacher(batch[0])).pow(2).mean()
        return loss


class JoinedGradients(Net):
    """As tutorials average gradients, which all ranks have alike here."""

    strategy: ClassVar[dict[str, Any]] = {"plan": "fsdp"}

    def joined(self, tensor: Tensor) -> None:
        if dist.is_initialized():
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()

    def on_after_backward(self) -> None:
        for p in self.parameters():
            self.joined(p.grad.data)


class JoinedParameters(JoinedGradients):
    def on_after_backward(self) -> None:
        pass

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for p in self.parameters():
            self.joined(p.data)
        whole = nn.utils.parameters_to_vector(p.data for p in self.parameters())
        self.joined(whole)
        nn.utils.vector_to_parameters(whole, self.parameters())


class JoinedByHand(ByHand, JoinedGradients):
    strategy: ClassVar[dict[str, Any]] = {"plan": "ddp"}

    def on_after_backward(self) -> None:
        pass

    def behind_backward(self) -> None:
        for p in self.parameters():
            self.joined(p.grad.data)


class JoinedLater(JoinedByHand):
    """All are started before the first is waited for."""

    strategy: ClassVar[dict[str, Any]] = {"plan": "fsdp"}

    def behind_backward(self) -> None:
        if dist.is_initialized():
            for work in [dist.all_reduce(p.grad, async_op=True) for p in self.parameters()]:
                work.wait()
            for p in self.parameters():
                p.grad /= 2


class AssignedBetween(ByHand):
    """Autograd follows the parameter before and after; a row of what it was is written into."""

    strategy: ClassVar[dict[str, Any]] = {"plan": "fsdp", "capture": "forward"}

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 24).view(6, 4))

    def loss(self, batch):
        self.kept = self.table.data.clone()
        first = (batch[0] @ self.table).pow(2).mean()
        with torch.no_grad():
            row = self.table[3]
        self.table.data = torch.arange(24.0).view(6, 4) / 24
        with torch.no_grad():
            row.mul_(0.5)
        second = (batch[0] @ self.table).sin().mean()
        return first.detach() + second + super().loss(batch)

    def behind_backward(self) -> None:
        if self.global_step % 2:
            self.table.data = self.kept


class Gossip(Net):
    """Each sends before it receives; what both have alike stays as it is."""

    strategy: ClassVar[dict[str, Any]] = {"plan": "fsdp"}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if dist.is_initialized():
            for p in self.parameters():
                other = torch.empty(p.shape)
                sent = dist.isend(p.data, 1 - dist.get_rank())
                dist.recv(other, 1 - dist.get_rank())
                sent.wait()
                p.data.add_(other).div_(2)


class Received(Net):
    strategy: ClassVar[dict[str, Any]] = {"plan": "fsdp"}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        bias = self.net[0].bias
        if not dist.is_initialized():
            bias.data.fill_(0.25)
            return
        sent = dist.isend(torch.full(bias.shape, 0.25), 1 - dist.get_rank())
        dist.recv(bias.data, 1 - dist.get_rank())
        sent.wait()


class GatheredActivations(Net):
    """What a collective only reads, autograd needs as it is."""

    strategy: ClassVar[dict[str, Any]] = {"plan": "fsdp", "capture": "forward"}

    def training_step(self, batch, batch_idx):
        logits = torch.tanh(self.net(batch[0]))
        if dist.is_initialized():
            dist.all_gather([torch.zeros_like(logits) for _ in range(2)], logits.detach())
        return (logits * logits).mean()


KINDS = [
    *(Averaged, AveragedCopies, AveragedByHand, Exchanged, AssignedBetween, Copying, GatheredActivations),
    *(JoinedGradients, JoinedParameters, JoinedByHand, JoinedLater, Gossip, Received),
]


@pytest.mark.parametrize("kind", KINDS)
def test_they_train_as_on_one_device(kind: type[Net], worlds: Worlds) -> None:
    expected = train(kind, None).parameters
    for outcome in worlds(2).run(train, kind, MESH, timeout_s=60):
        torch.testing.assert_close(outcome.parameters, expected, rtol=1e-5, atol=1e-6)


class Flat(Net):
    """Parameters become views of one tensor."""

    strategy: ClassVar[dict[str, Any]] = {"plan": "fsdp"}

    def on_fit_start(self) -> None:
        flat = torch.cat([p.detach().flatten() for p in self.parameters()]).clone()
        parts = flat.split([p.numel() for p in self.parameters()])
        for p, part in zip(self.parameters(), parts, strict=True):
            p.data = part.view(p.shape) if not dist.is_initialized() else self.whole(part).view(p.shape)

    def whole(self, part: Tensor) -> Tensor:
        whole = part.full_tensor() if hasattr(part, "full_tensor") else part
        return torch.cat([whole, whole])[: whole.numel()]


def test_that_parts_are_copies_is_said(worlds: Worlds) -> None:
    first, _ = worlds(2).run(train, Flat, MESH, timeout_s=60)
    assert any("assigns a part of a larger tensor to .data" in text for text in first.warnings)


class OfAnotherShape(Net):
    strategy: ClassVar[dict[str, Any]] = {"plan": "fsdp"}

    def on_fit_start(self) -> None:
        self.net[0].weight.data = torch.tensor(0.0)


def test_data_of_another_shape_is_refused(worlds: Worlds) -> None:
    with pytest.raises(WorldError, match=r"would change that: do so before training"):
        worlds(2).run(train, OfAnotherShape, MESH, timeout_s=60)
