"""Classification, segmentation, detection and video models of torchvision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.thirdparty.built import (
    ROWS,
    STEPS,
    Builder,
    Built,
    Step,
    generator,
    images,
    items_of,
    stirred,
    without_dropout,
)


def classifier(make: Callable[[], nn.Module], size: int = 32) -> Built:
    """A classifier on images."""
    return Built(module=Step(stirred(without_dropout(make())), _loss), batches=images(size=size))


def _loss(net: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def resnet() -> nn.Module:
    """The smallest ResNet that the class makes."""
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5, width_per_group=64)


def named(name: str, **options: Any) -> nn.Module:
    """A model by its name, with random weights."""
    import torchvision

    return torchvision.models.get_model(name, weights=None, num_classes=5, **options)


def vit() -> nn.Module:
    """A vision transformer of two layers."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=5)


def swin() -> nn.Module:
    """Shifted windows, two stages."""
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 8, [2, 1], [2, 2], [4, 4], stochastic_depth_prob=0.0, num_classes=5)


def convnext() -> nn.Module:
    """ConvNeXt, two stages."""
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], stochastic_depth_prob=0.0, num_classes=5)


def densenet() -> nn.Module:
    """Two dense blocks."""
    from torchvision.models import DenseNet

    return DenseNet(growth_rate=8, block_config=(2, 2), num_init_features=8, num_classes=5)


def segmentation(name: str) -> Built:
    """A class per pixel."""
    import torchvision

    make = torchvision.models.get_model
    net = make(name, weights=None, weights_backbone=None, num_classes=3)
    random = generator()
    batches = [
        (torch.randn(ROWS, 3, 32, 32, generator=random), torch.randint(0, 3, (ROWS, 32, 32), generator=random))
        for _ in range(STEPS)
    ]

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(net(batch[0])["out"], batch[1])

    return Built(module=Step(without_dropout(net), loss), batches=batches)


def detector(kind: str) -> Built:
    """A dense detector on a small backbone: lists of images and of targets with unequal counts of boxes."""
    from torchvision.models import detection
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, 32, 3, 4, 1), nn.ReLU())
    backbone.out_channels = 32
    shapes = 1 if kind == "FCOS" else 3
    anchors = AnchorGenerator(sizes=((16,),), aspect_ratios=((1.0,) if shapes == 1 else (0.5, 1.0, 2.0),))
    options = {"min_size": 64, "max_size": 64, "anchor_generator": anchors}
    net = getattr(detection, kind)(backbone, num_classes=3, **options)
    random = generator()
    batches = [[_scene(random, count=1 + row % 2) for row in range(ROWS)] for _ in range(STEPS)]

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        return sum(net([image for image, _ in batch], [target for _, target in batch]).values())

    return Built(module=Step(net, loss, rate=1e-3), batches=batches, rows=items_of)


def _scene(random: torch.Generator, count: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    corners = torch.rand(count, 2, generator=random) * 30
    boxes = torch.cat([corners, corners + 8 + torch.rand(count, 2, generator=random) * 20], dim=1)
    labels = torch.randint(1, 3, (count,), generator=random)
    return torch.rand(3, 64, 64, generator=random), {"boxes": boxes, "labels": labels}


def video() -> Built:
    """3-D convolutions."""
    from torchvision.models.video.resnet import BasicBlock, BasicStem, Conv3DSimple, VideoResNet

    net = VideoResNet(BasicBlock, [Conv3DSimple] * 4, [1, 1, 1, 1], BasicStem, num_classes=5)
    random = generator()
    batches = [
        (torch.randn(ROWS, 3, 8, 32, 32, generator=random), torch.randint(0, 5, (ROWS,), generator=random))
        for _ in range(STEPS)
    ]
    return Built(module=Step(net, _loss), batches=batches)


def augmented() -> Built:
    """Mixed images, drawn by the library inside of the step."""
    from torchvision.transforms import v2

    built = classifier(vit)
    mixup = v2.MixUp(num_classes=5)

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = mixup(*batch)
        return F.cross_entropy(net(images), labels)

    built.module.loss = loss
    return built


MODELS: dict[str, Builder] = {
    "resnet": partial(classifier, resnet),
    "mobilenet_v3_small": partial(classifier, partial(named, "mobilenet_v3_small")),
    "densenet": partial(classifier, densenet),
    "squeezenet": partial(classifier, partial(named, "squeezenet1_1"), 64),
    "vit": partial(classifier, vit),
    "swin": partial(classifier, swin),
    "convnext": partial(classifier, convnext),
    "lraspp": partial(segmentation, "lraspp_mobilenet_v3_large"),
    "retinanet": partial(detector, "RetinaNet"),
    "fcos": partial(detector, "FCOS"),
    "video_resnet": video,
    "mixup": augmented,
}
