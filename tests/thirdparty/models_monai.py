"""Networks of MONAI with its losses, on small volumes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.thirdparty.built import ROWS, STEPS, Builder, Built, Step, generator, without_dropout


def segmentation(kind: str, loss_kind: str = "DiceCELoss", dims: int = 3, size: int = 16, **options: Any) -> Built:
    """A network that labels every voxel, with one of the losses on three classes."""
    from monai import losses
    from monai.networks import nets

    net = without_dropout(getattr(nets, kind)(**options))
    settings = {"to_onehot_y": True} if loss_kind != "DiceFocalLoss" else {"to_onehot_y": True, "gamma": 1.0}
    criterion = getattr(losses, loss_kind)(**settings)
    if loss_kind.startswith("Dice") or loss_kind == "TverskyLoss":
        criterion = getattr(losses, loss_kind)(**settings, softmax=True)

    def loss(net: Any, batch: Any) -> torch.Tensor:
        images, labels = batch
        result = net(images)
        return criterion(result[0] if isinstance(result, list | tuple) else result, labels)

    return Built(module=Step(net, loss, rate=0.1), batches=volumes(dims, size))


def volumes(dims: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of volumes and their labels."""
    random, shape = generator(), (size,) * dims
    return [
        (
            torch.randn(ROWS, 1, *shape, generator=random),
            torch.randint(0, 3, (ROWS, 1, *shape), generator=random),
        )
        for _ in range(STEPS)
    ]


def meta_tensors() -> Built:
    """Batches as MONAI's loaders make them: tensors that carry their affine matrix and a history."""
    from monai.data import MetaTensor

    built = segmentation("BasicUNet", size=32, dims=2, **UNET, spatial_dims=2)
    batches = [tuple(MetaTensor(tensor) for tensor in batch) for batch in built.batches]
    return Built(module=built.module, batches=batches)


def autoencoder() -> Built:
    """A quantised autoencoder, whose codebook is a running mean in buffers."""
    from monai.networks.nets import VQVAE

    net = VQVAE(
        spatial_dims=2,
        in_channels=1,
        out_channels=1,
        channels=(8, 8),
        num_res_channels=8,
        num_res_layers=1,
        downsample_parameters=((2, 4, 1, 1),) * 2,
        upsample_parameters=((2, 4, 1, 1, 0),) * 2,
        num_embeddings=8,
        embedding_dim=4,
    )

    def loss(net: Any, batch: Any) -> torch.Tensor:
        reconstruction, quantization = net(batch[0])
        return torch.nn.functional.l1_loss(reconstruction, batch[0]) + quantization

    return Built(module=Step(net, loss), batches=volumes(2, 16))


def classifier(kind: str, **options: Any) -> Built:
    """A class per volume."""
    from monai.networks import nets

    net = without_dropout(getattr(nets, kind)(spatial_dims=2, **options))
    random = generator()
    batches = [
        (torch.randn(2 * ROWS, 1, 32, 32, generator=random), torch.randint(0, 3, (2 * ROWS,), generator=random))
        for _ in range(STEPS)
    ]

    def loss(net: Any, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(net(batch[0]), batch[1])

    return Built(module=Step(net, loss), batches=batches)


CHANNELS = {"in_channels": 1, "out_channels": 3}
UNET = {**CHANNELS, "features": (8, 8, 16, 16, 16, 8)}
DENSE = {**CHANNELS, "init_features": 8, "growth_rate": 4, "block_config": (2, 2)}
UNETR = {**CHANNELS, "img_size": 16, "feature_size": 4, "hidden_size": 16, "mlp_dim": 24, "num_heads": 2}
STRIDES = {"kernel_size": [3] * 3, "strides": [1, 2, 2], "upsample_kernel_size": [2, 2], "filters": [8, 8, 16]}

MODELS: dict[str, Builder] = {
    "unet_dice": partial(
        segmentation, "UNet", "DiceLoss", spatial_dims=3, **CHANNELS, channels=(8, 16), strides=(2,), num_res_units=1
    ),
    "basic_unet": partial(segmentation, "BasicUNet", size=32, dims=2, spatial_dims=2, **UNET),
    "segresnet_focal": partial(segmentation, "SegResNet", "DiceFocalLoss", spatial_dims=3, init_filters=8, **CHANNELS),
    "dynunet_tversky": partial(segmentation, "DynUNet", "TverskyLoss", spatial_dims=3, **CHANNELS, **STRIDES),
    "unetr": partial(segmentation, "UNETR", **UNETR),
    "attention_unet": partial(
        segmentation, "AttentionUnet", "FocalLoss", spatial_dims=3, **CHANNELS, channels=(8, 16), strides=(2,)
    ),
    "meta_tensors": meta_tensors,
    "vqvae": autoencoder,
    "densenet": partial(classifier, "DenseNet", **DENSE),
}
