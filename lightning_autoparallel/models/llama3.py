"""Llama 3 as plain torch (Dubey et al. 2024, section 3.2): RMSNorm, rotary embedding, grouped queries, SwiGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.models.llama3_config import LLAMA3_SIZES, Llama3Config, llama3_config
from lightning_autoparallel.models.rope import apply_rope, rope_table

__all__ = ["LLAMA3_SIZES", "Attention", "Block", "FeedForward", "Llama3", "Llama3Config", "RMSNorm", "llama3_config"]

_INIT_STD = 0.02


class Linear(nn.Linear):
    """A bias-free linear layer drawn from a normal distribution of standard deviation `init_std`."""

    def __init__(self, in_features: int, out_features: int, init_std: float = _INIT_STD) -> None:
        # Set first: nn.Linear's constructor already calls reset_parameters.
        self.init_std = init_std
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight anew."""
        nn.init.normal_(self.weight, std=self.init_std)


class Embedding(nn.Embedding):
    """A token embedding drawn like `Linear`."""

    def reset_parameters(self) -> None:
        """Draw the table anew."""
        nn.init.normal_(self.weight, std=_INIT_STD)


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim (Zhang and Sennrich 2019, equation 4)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gain to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` (..., dim) in float32; shape and dtype are kept."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).type_as(x) * self.weight


class Attention(nn.Module):
    """Causal self-attention whose key/value heads are shared by groups of query heads (Ainslie et al. 2023)."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.queries_per_kv = config.n_heads // config.n_kv_heads
        kv_dim = config.n_kv_heads * config.head_dim
        self.wq = Linear(config.dim, config.dim)
        self.wk = Linear(config.dim, kv_dim)
        self.wv = Linear(config.dim, kv_dim)
        self.wo = Linear(config.dim, config.dim, _residual_std(config))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend within each sequence: `x` (B, T, dim) and `rope_table`'s values to (B, T, dim)."""
        query, key, value = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        query, key = apply_rope(query, cos, sin), apply_rope(key, cos, sin)
        key, value = self._repeat(key), self._repeat(value)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        return self.wo(mixed.transpose(1, 2).flatten(-2))

    def _repeat(self, x: Tensor) -> Tensor:
        """(B, T, kv heads, head_dim) to (B, T, heads, head_dim): each head repeated for the queries that share it."""
        return x.unsqueeze(3).expand(-1, -1, -1, self.queries_per_kv, -1).flatten(2, 3)


class FeedForward(nn.Module):
    """SwiGLU: `w2(silu(w1 x) * w3 x)` (Shazeer 2020, equation 6)."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.w1 = Linear(config.dim, config.ffn_dim)
        self.w2 = Linear(config.ffn_dim, config.dim, _residual_std(config))
        self.w3 = Linear(config.dim, config.ffn_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` (B, T, dim) to (B, T, dim)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One transformer layer with pre-normalised attention and feed-forward."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map the residual stream `x` (B, T, dim) to (B, T, dim)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama3(nn.Module):
    """A decoder-only language model; on the meta device it is built without allocating anything.

    Args:
        config: the network's shape, e.g. `LLAMA3_SIZES["8B"]`.
    """

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        # Tied: no second name for the table, so that materialising parameters one by one cannot untie it.
        self.output = None if config.tie_embeddings else Linear(config.dim, config.vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score the next token at every position.

        Args:
            tokens: ids (B, T), int64, each below `vocab_size`.

        Returns:
            Logits (B, T, vocab_size).

        Raises:
            ConfigError: T is above `max_seq_len`.
        """
        seq_len = tokens.shape[1]
        if seq_len > self.config.max_seq_len:
            raise ConfigError(
                f"The batch holds sequences of {seq_len} tokens, the model is configured for max_seq_len="
                f"{self.config.max_seq_len}; shorten them or raise max_seq_len."
            )
        x = self.tok_embeddings(tokens)
        cos, sin = rope_table(self.config, seq_len, tokens.device)
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        return F.linear(x, self.tok_embeddings.weight) if self.output is None else self.output(x)


def _residual_std(config: Llama3Config) -> float:
    """Standard deviation for layers that write to the residual stream (Radford et al. 2019, section 2.3).

    Each of the `2 n_layers` writes adds its variance, so each starts smaller by the root of their number.
    """
    return _INIT_STD / float(2 * config.n_layers) ** 0.5
