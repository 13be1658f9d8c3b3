"""Networks and losses of segmentation-models-pytorch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.thirdparty.built import ROWS, STEPS, Builder, Built, Step, generator

# The mobile encoders amplify rounding: 1e-7 is 1e-1 after three steps.
BACKBONE = "tu-test_resnet"


def segmentation(kind: str, loss_kind: str = "DiceLoss", classes: int = 1, size: int = 64, **options: Any) -> Built:
    """A network of the library with one of its losses."""
    import segmentation_models_pytorch as smp

    mode = "binary" if classes == 1 else "multiclass"
    kinds = {"SoftBCEWithLogitsLoss": {}}
    criterion = getattr(smp.losses, loss_kind)(**kinds.get(loss_kind, {"mode": mode}))
    net = getattr(smp, kind)(options.pop("encoder", "resnet18"), encoder_weights=None, classes=classes, **options)
    random = generator()
    shape = (ROWS, 1, size, size) if classes == 1 else (ROWS, size, size)
    batches = [
        (
            torch.randn(ROWS, 3, size, size, generator=random),
            torch.randint(0, max(classes, 2), shape, generator=random),
        )
        for _ in range(STEPS)
    ]

    def loss(net: Any, batch: Any) -> torch.Tensor:
        images, masks = batch
        return criterion(net(images), masks.float() if classes == 1 else masks)

    return Built(module=Step(net, loss), batches=batches)


SMALL = {"decoder_channels": (16, 16, 8, 8, 8)}

MODELS: dict[str, Builder] = {
    "unet_dice": partial(segmentation, "Unet", **SMALL, encoder=BACKBONE),
    "unet_lovasz": partial(segmentation, "Unet", "LovaszLoss", 3, **SMALL, encoder=BACKBONE),
    "fpn_focal": partial(
        segmentation,
        "FPN",
        "FocalLoss",
        3,
        encoder=BACKBONE,
        decoder_pyramid_channels=16,
        decoder_segmentation_channels=32,
        decoder_dropout=0.0,
    ),
    "deeplab_bce": partial(
        segmentation,
        "DeepLabV3Plus",
        "SoftBCEWithLogitsLoss",
        encoder=BACKBONE,
        decoder_channels=16,
        decoder_aspp_dropout=0.0,
    ),
    "pspnet_jaccard": partial(
        segmentation, "PSPNet", "JaccardLoss", 3, encoder=BACKBONE, psp_out_channels=16, psp_dropout=0.0
    ),
    "unetplusplus_tversky": partial(segmentation, "UnetPlusPlus", "TverskyLoss", **SMALL, encoder=BACKBONE),
}
