"""Image classifiers of timm, made narrow and shallow."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F

from tests.thirdparty.built import Builder, Built, Step, images, stirred, without_dropout


def classifier(name: str, size: int = 32, optimizer: str = "sgd", **sizes: Any) -> Built:
    """`timm.create_model(name)` with five classes and no dropout."""
    import timm

    net = stirred(without_dropout(timm.create_model(name, num_classes=5, **sizes)))
    return Built(module=Step(net, _loss, optimizer), batches=images(size=size))


def mixer(kind: str, ratio: Any) -> Built:
    """Networks of matrix products over places and over channels."""
    from timm.models import mlp_mixer

    block = getattr(mlp_mixer, kind)
    net = mlp_mixer.MlpMixer(
        num_classes=5, img_size=32, patch_size=8, num_blocks=2, embed_dim=16, mlp_ratio=ratio, block_layer=block
    )
    return Built(module=Step(stirred(net), _loss), batches=images())


def poolformer() -> Built:
    """Pooling in the place of attention."""
    from timm.models.metaformer import MetaFormer

    net = MetaFormer(depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=5, use_mlp_head=False)
    return Built(module=Step(stirred(net), _loss), batches=images())


def label_smoothing() -> Built:
    """timm's own loss."""
    from timm.loss import LabelSmoothingCrossEntropy

    built = classifier("resnet10t", stem_width=8, channels=(8, 8, 16, 16))
    criterion = LabelSmoothingCrossEntropy(0.1)
    built.module.loss = lambda net, batch: criterion(net(batch[0]), batch[1])
    return built


def weight_average(at_once: bool = False) -> Built:
    """An exponential moving average of the weights, brought up to date by a hook after every batch."""
    from timm.utils import ModelEmaV3

    built = classifier("vit_tiny_patch16_224", **TRANSFORMER)
    average = ModelEmaV3(built.module.net, decay=0.9, foreach=at_once)
    built.module.on_train_batch_end = lambda *args: average.update(built.module.net)
    return built


def _loss(net: Any, batch: Any) -> Any:
    return F.cross_entropy(net(batch[0]), batch[1])


TRANSFORMER = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}

MODELS: dict[str, Builder] = {
    "resnet": partial(classifier, "resnet10t", stem_width=8, channels=(8, 8, 16, 16)),
    "vit": partial(classifier, "vit_tiny_patch16_224", optimizer="adamw", **TRANSFORMER),
    "deit_distilled": partial(classifier, "deit_tiny_distilled_patch16_224", **TRANSFORMER),
    "beit": partial(classifier, "beit_base_patch16_224", **TRANSFORMER, head_init_scale=1.0),
    "eva": partial(classifier, "eva02_tiny_patch14_224", **TRANSFORMER, head_init_scale=1.0),
    "cait": partial(classifier, "cait_xxs24_224", **TRANSFORMER),
    "xcit": partial(classifier, "xcit_nano_12_p16_224", **{**TRANSFORMER, "patch_size": 16}),
    "convnext": partial(classifier, "convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    "swin": partial(
        classifier,
        "swin_tiny_patch4_window7_224",
        img_size=32,
        embed_dim=8,
        depths=(2, 1),
        num_heads=(2, 2),
        window_size=4,
        drop_path_rate=0.0,
    ),
    "efficientnet": partial(classifier, "test_efficientnet"),
    "mobilenetv3": partial(classifier, "mobilenetv3_small_050", 96),
    "mixer": partial(mixer, "MixerBlock", (0.5, 4.0)),
    "resmlp": partial(mixer, "ResBlock", 4),
    "poolformer": poolformer,
    "regnet": partial(classifier, "regnetx_002"),
    "densenet": partial(classifier, "densenet121", growth_rate=8, block_config=(2, 2)),
    "byob": partial(classifier, "test_byobnet"),
    "nfnet": partial(classifier, "test_nfnet"),
    "label_smoothing": label_smoothing,
    "weight_average": weight_average,
    "weight_average_at_once": partial(weight_average, at_once=True),
}
