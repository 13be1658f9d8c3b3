"""Denoisers of diffusers under its schedulers; noise and times are in the batch, so that all sides draw the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.thirdparty.built import ROWS, STEPS, Builder, Built, Step, generator

LATENT = {"sample_size": 8, "in_channels": 3, "out_channels": 3, "layers_per_block": 1, "norm_num_groups": 4}


def denoiser(
    net: nn.Module, predict: Callable[[nn.Module, torch.Tensor, dict[str, Any]], torch.Tensor], size: int = 8
) -> Built:
    """Predict the noise that a DDPM scheduler added."""
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler(num_train_timesteps=100)

    def loss(net: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        noisy = scheduler.add_noise(batch["images"], batch["noise"], batch["times"])
        return F.mse_loss(predict(net, noisy, batch), batch["noise"])

    random = generator()
    batches = [
        {
            "images": torch.randn(ROWS, 3, size, size, generator=random),
            "noise": torch.randn(ROWS, 3, size, size, generator=random),
            "times": torch.randint(0, 100, (ROWS,), generator=random),
            "words": torch.randn(ROWS, 4, 16, generator=random),
            "labels": torch.randint(0, 5, (ROWS,), generator=random),
        }
        for _ in range(STEPS)
    ]
    return Built(module=Step(net, loss), batches=batches)


def unet() -> Built:
    """Without conditions."""
    from diffusers import UNet2DModel

    net = UNet2DModel(
        **LATENT,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )
    return denoiser(net, lambda net, noisy, batch: net(noisy, batch["times"]).sample)


def conditional_unet() -> Built:
    """Attends to the words of a text."""
    from diffusers import UNet2DConditionModel

    net = UNet2DConditionModel(
        **LATENT,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
    )
    return denoiser(net, lambda net, noisy, batch: net(noisy, batch["times"], batch["words"]).sample)


def transformer() -> Built:
    """DiT: classes condition the norms."""
    from diffusers import DiTTransformer2DModel

    net = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=3,
        out_channels=3,
        num_layers=1,
        norm_num_groups=1,
        sample_size=8,
        num_embeds_ada_norm=100,
    ).eval()  # in training it drops classes at random

    def predict(net: nn.Module, noisy: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        return net(noisy, batch["times"], batch["labels"]).sample

    return denoiser(net, predict)


def autoencoder() -> Built:
    """AutoencoderKL on the mean of its posterior, with the divergence that the distribution object computes."""
    from diffusers import AutoencoderKL

    net = AutoencoderKL(
        sample_size=16,
        latent_channels=2,
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
    )
    built = denoiser(net, lambda net, noisy, batch: noisy, size=16)

    def loss(net: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        posterior = net.encode(batch["images"]).latent_dist
        reconstruction = net.decode(posterior.mode()).sample
        return F.mse_loss(reconstruction, batch["images"]) + 1e-3 * posterior.kl().mean()

    built.module.loss = loss
    return built


MODELS: dict[str, Builder] = {
    "unet": unet,
    "conditional_unet": conditional_unet,
    "dit": transformer,
    "autoencoder_kl": autoencoder,
}
