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

from tests.distributed.jobs import MESH, Net, train
from tests.support.worlds import Worlds


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


class AveragedByHand(Averaged):
    """In the step itself, too, which runs its own Python."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        kept = [p.data for p in self.net.parameters()]
        for p in self.net.parameters():
            p.data = p.data * 1.1
        with torch.no_grad():
            wanted = self.net(batch[0])
        for p, before in zip(self.net.parameters(), kept, strict=True):
            p.data = before
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch) + (self.net(batch[0]) - wanted).pow(2).mean())
        optimizer.step()


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


class JoinedByHand(JoinedGradients):
    strategy: ClassVar[dict[str, Any]] = {"plan": "ddp"}

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for p in self.parameters():
            self.joined(p.grad.data)
        optimizer.step()


KINDS = [
    *(Averaged, AveragedCopies, AveragedByHand, Exchanged),
    *(Copying, JoinedGradients, JoinedParameters, JoinedByHand),
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
