"""Self-supervised methods put together from lightly's heads and losses, as its examples do."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.thirdparty.built import STEPS, Builder, Built, Step, generator

ROWS = 8
DIM = 16


def backbone() -> nn.Sequential:
    """A small convolutional net that gives a vector per image."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, DIM, 3, 2, 1), nn.AdaptiveAvgPool2d(1)
    ).append(nn.Flatten())


def views() -> list[list[torch.Tensor]]:
    """Batches of two views of the same images."""
    random, batches = generator(), []
    for _ in range(STEPS):
        first = torch.randn(ROWS, 3, 16, 16, generator=random)
        batches.append([first, first + 0.3 * torch.randn(first.shape, generator=random)])
    return batches


class _Pair(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone(), head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


def joint_embedding(loss_kind: str, head_kind: str = "SimCLRProjectionHead", **options: Any) -> Built:
    """Both views through one network, one of lightly's losses between them."""
    from lightly import loss as losses
    from lightly.models.modules import heads

    module = Step(_Pair(getattr(heads, head_kind)(DIM, DIM, 8)), lambda net, batch: criterion(*map(net, batch)))
    criterion = module.criterion = getattr(losses, loss_kind)(**options)
    for buffer in criterion.buffers():  # lightly makes the pointer into a bank of no rows with torch.empty
        buffer.zero_()
    return Built(module=module, batches=views())


class SimSiam(Step):
    """A predictor on one side, no gradient on the other."""

    def __init__(self) -> None:
        from lightly.loss import NegativeCosineSimilarity
        from lightly.models.modules.heads import SimSiamPredictionHead, SimSiamProjectionHead

        super().__init__(_Pair(SimSiamProjectionHead(DIM, DIM, 8)), self._compare)
        self.predictor, self.criterion = SimSiamPredictionHead(8, 4, 8), NegativeCosineSimilarity()

    def _compare(self, net: nn.Module, batch: Any) -> torch.Tensor:
        first, second = net(batch[0]), net(batch[1])
        forth = self.criterion(self.predictor(first), second.detach())
        return 0.5 * (forth + self.criterion(self.predictor(second), first.detach()))


class BYOL(Step):
    """A momentum encoder, whose weights the step changes without gradients."""

    def __init__(self) -> None:
        from lightly.loss import NegativeCosineSimilarity
        from lightly.models.modules.heads import BYOLPredictionHead, BYOLProjectionHead
        from lightly.models.utils import deactivate_requires_grad

        super().__init__(_Pair(BYOLProjectionHead(DIM, DIM, 8)), self._compare)
        self.predictor, self.criterion = BYOLPredictionHead(8, DIM, 8), NegativeCosineSimilarity()
        self.target = copy.deepcopy(self.net)
        deactivate_requires_grad(self.target)

    def _compare(self, net: nn.Module, batch: Any) -> torch.Tensor:
        from lightly.models.utils import update_momentum
        from lightly.utils.scheduler import cosine_schedule

        update_momentum(net, self.target, m=cosine_schedule(self.global_step, 10, 0.9, 1.0))
        online = [self.predictor(net(view)) for view in batch]
        with torch.no_grad():
            target = [self.target(view) for view in batch]
        return 0.5 * (self.criterion(online[0], target[1]) + self.criterion(online[1], target[0]))


class MoCo(Step):
    """A momentum encoder and a queue of negatives in a buffer."""

    def __init__(self) -> None:
        from lightly.loss import NTXentLoss
        from lightly.models.modules.heads import MoCoProjectionHead
        from lightly.models.utils import deactivate_requires_grad

        super().__init__(_Pair(MoCoProjectionHead(DIM, DIM, 8)), self._compare)
        self.criterion = NTXentLoss(memory_bank_size=(32, 8))
        self.momentum = copy.deepcopy(self.net)
        deactivate_requires_grad(self.momentum)

    def _compare(self, net: nn.Module, batch: Any) -> torch.Tensor:
        from lightly.models.utils import update_momentum

        update_momentum(net, self.momentum, m=0.9)
        with torch.no_grad():
            key = self.momentum(batch[1])
        return self.criterion(net(batch[0]), key)


class DINO(Step):
    """A teacher, and a center that the loss keeps in a buffer; the temperature follows the epoch."""

    def __init__(self) -> None:
        from lightly.loss import DINOLoss
        from lightly.models.modules.heads import DINOProjectionHead
        from lightly.models.utils import deactivate_requires_grad

        student, teacher = (_Pair(DINOProjectionHead(DIM, DIM, 8, 12, batch_norm=False)) for _ in range(2))
        super().__init__(student, self._compare, rate=1e-3)
        self.criterion = DINOLoss(output_dim=12, warmup_teacher_temp_epochs=2)
        self.teacher = teacher  # its weight norm has no copy
        self.teacher.load_state_dict(self.net.state_dict())
        deactivate_requires_grad(self.teacher)

    def _compare(self, net: nn.Module, batch: Any) -> torch.Tensor:
        from lightly.models.utils import update_momentum

        update_momentum(net, self.teacher, m=0.9)
        with torch.no_grad():
            teacher = [self.teacher(view) for view in batch]
        return self.criterion(teacher, [net(view) for view in batch], epoch=self.current_epoch)

    def on_after_backward(self):
        self.net.head.cancel_last_layer_gradients(current_epoch=self.current_epoch)


class SwAV(Step):
    """Prototypes that are normalised before every step, codes by Sinkhorn's iterations."""

    def __init__(self) -> None:
        from lightly.loss import SwaVLoss
        from lightly.models.modules.heads import SwaVProjectionHead, SwaVPrototypes

        super().__init__(_Pair(SwaVProjectionHead(DIM, DIM, 8)), self._compare)
        self.prototypes, self.criterion = SwaVPrototypes(8, 6), SwaVLoss()

    def _compare(self, net: nn.Module, batch: Any) -> torch.Tensor:
        self.prototypes.normalize()
        views = [nn.functional.normalize(net(view), dim=1) for view in batch]
        return self.criterion([self.prototypes(view) for view in views], [])


def method(kind: type[Step]) -> Built:
    """One of the methods above on two views."""
    return Built(module=kind(), batches=views())


MODELS: dict[str, Builder] = {
    "simclr": partial(joint_embedding, "NTXentLoss"),
    "simclr_gathered": partial(joint_embedding, "NTXentLoss", gather_distributed=True),
    "vicreg": partial(joint_embedding, "VICRegLoss", "VICRegProjectionHead"),
    "barlow_twins": partial(joint_embedding, "BarlowTwinsLoss", "BarlowTwinsProjectionHead"),
    "dcl": partial(joint_embedding, "DCLLoss"),
    "simsiam": partial(method, SimSiam),
    "byol": partial(method, BYOL),
    "moco": partial(method, MoCo),
    "dino": partial(method, DINO),
    "swav": partial(method, SwAV),
}
