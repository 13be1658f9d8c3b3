"""The shape of a Llama 3 network, and the published sizes by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from lightning_autoparallel.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Llama3Config:
    """Hyper-parameters of a Llama 3 network (Dubey et al. 2024, "The Llama 3 Herd of Models", table 3).

    Attributes:
        dim: width of the residual stream.
        n_layers: number of transformer blocks.
        n_heads: number of query heads; the head dimension is `dim / n_heads`.
        n_kv_heads: number of key/value heads, each shared by `n_heads / n_kv_heads` query heads.
        vocab_size: number of token ids.
        ffn_dim_multiplier: factor on the feed-forward width, see `ffn_dim`.
        multiple_of: the feed-forward width is rounded up to a multiple of this.
        norm_eps: added to the mean square inside RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: whether the rotary frequencies are stretched for long contexts, as from Llama 3.1 on.
        rope_factor: how much the lowest frequencies are divided by (8 for 3.1, 32 for 3.2 1B and 3B).
        rope_low_freq_factor: wavelengths above `rope_original_seq_len / this` are stretched fully.
        rope_high_freq_factor: wavelengths below `rope_original_seq_len / this` are not stretched.
        rope_original_seq_len: context length in tokens before stretching.
        max_seq_len: longest sequence in tokens that `forward` accepts.
        tie_embeddings: whether the output projection reuses the embedding table.

    Raises:
        ConfigError: a value is out of range or two values do not fit each other.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int = 128256
    ffn_dim_multiplier: float = 1.0
    multiple_of: int = 256
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: bool = True
    rope_factor: float = 8.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_seq_len: int = 8192
    max_seq_len: int = 131072
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or (not isinstance(value, bool) and value <= 0):
                raise ConfigError(f"Llama3Config.{field.name} is {value!r}; give a number above 0.")
        self._check_heads()
        if self.rope_high_freq_factor <= self.rope_low_freq_factor:
            raise ConfigError(
                f"Llama3Config.rope_high_freq_factor is {self.rope_high_freq_factor}, not above rope_low_freq_factor "
                f"({self.rope_low_freq_factor}); the published values are 4 and 1."
            )

    def _check_heads(self) -> None:
        if self.dim % self.n_heads:
            raise ConfigError(f"dim={self.dim} does not split into n_heads={self.n_heads}; use a divisor of dim.")
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"n_heads={self.n_heads} query heads cannot share n_kv_heads={self.n_kv_heads} evenly; "
                "use a divisor of n_heads."
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"The head dimension dim / n_heads = {self.head_dim} is odd, but rotary embedding turns pairs of "
                "values; choose dim and n_heads with an even quotient."
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads

    @property
    def ffn_dim(self) -> int:
        """Hidden width of the SwiGLU layer: 2/3 of `4 dim`, times the multiplier, rounded up to `multiple_of`.

        Two thirds keep the parameter count of a two-matrix layer of width `4 dim` (Shazeer 2020, section 2).
        """
        # Truncating twice, as published: the sizes of the released checkpoints depend on it.
        width = int(self.ffn_dim_multiplier * int(2 * 4 * self.dim / 3))
        return -(-width // self.multiple_of) * self.multiple_of


LLAMA3_SIZES: Mapping[str, Llama3Config] = MappingProxyType(
    {
        "debug": Llama3Config(
            dim=128,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            vocab_size=256,
            multiple_of=32,
            rope_scaling=False,
            max_seq_len=2048,
        ),
        "1B": Llama3Config(
            dim=2048,
            n_layers=16,
            n_heads=32,
            n_kv_heads=8,
            ffn_dim_multiplier=1.5,
            rope_factor=32.0,
            tie_embeddings=True,
        ),
        "3B": Llama3Config(dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, rope_factor=32.0, tie_embeddings=True),
        "8B": Llama3Config(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=1024),
        "70B": Llama3Config(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=4096),
        "405B": Llama3Config(
            dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim_multiplier=1.2, multiple_of=4096
        ),
    }
)
"""The published networks (3.2 for 1B and 3B, 3.1 above), and "debug", a tiny one over bytes."""


def llama3_config(size: str, overrides: Mapping[str, Any] | None = None) -> Llama3Config:
    """The configuration of a named size, with single values replaced.

    Args:
        size: a key of `LLAMA3_SIZES`.
        overrides: fields of `Llama3Config` to replace.

    Raises:
        ConfigError: the size or a field is unknown, or the result is inconsistent.
    """
    if size not in LLAMA3_SIZES:
        raise ConfigError(f"Unknown Llama 3 size {size!r}; choose one of {', '.join(LLAMA3_SIZES)}.")
    overrides = dict(overrides or {})
    known = [field.name for field in fields(Llama3Config)]
    if unknown := sorted(set(overrides) - set(known)):
        raise ConfigError(f"Llama3Config has no {', '.join(unknown)}; overrides may name {', '.join(known)}.")
    return replace(LLAMA3_SIZES[size], **overrides)
