"""Rotary position embedding with Llama 3.1's frequency scaling, in real arithmetic and without buffers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_autoparallel.models.llama3_config import Llama3Config


def rope_frequencies(config: Llama3Config, device: torch.device) -> Tensor:
    """Angular frequencies in radians per token, float32, shape (head_dim / 2,).

    Pair i turns with `theta ** (-2 i / head_dim)` (Su et al. 2021, equation 15). With `rope_scaling` a frequency of
    wavelength `w = 2 pi / f` becomes `(s + (1 - s) / factor) f`, where `s = (L / w - low) / (high - low)` clamped to
    [0, 1] and L is the original context (Llama 3.1): short waves stay, long ones are stretched, between them a ramp.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if not config.rope_scaling:
        return frequencies
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    waves_in_context = frequencies * (config.rope_original_seq_len / (2 * math.pi))
    kept = ((waves_in_context - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / config.rope_factor)


def rope_table(config: Llama3Config, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, float32, each of shape (seq_len, 1, head_dim / 2).

    Computed anew in each forward: a buffer would need a value after the model was built on the meta device.
    """
    positions = torch.arange(seq_len, dtype=torch.float32, device=device)
    angles = positions[:, None, None] * rope_frequencies(config, device)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs of values by their position's angle.

    Pairs are (0, 1), (2, 3), ... as in Meta's checkpoints; Hugging Face's pair (0, head_dim / 2), ..., so that its
    query and key weights need their rows reordered.

    Args:
        x: queries or keys (B, T, heads, head_dim) of any floating dtype.
        cos: `rope_table`'s first value.
        sin: `rope_table`'s second value.

    Returns:
        The rotated tensor, shape and dtype of `x`; computed in float32.
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).type_as(x)
