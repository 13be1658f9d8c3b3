"""Wrappers of x-transformers around its attention layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.thirdparty.built import Builder, Built, Step, images, tokens

SIZES = {"dim": 16, "depth": 2, "heads": 2, "attn_dim_head": 8}


def autoregressive(**options: Any) -> Built:
    """Next-token training by the library's wrapper."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(**SIZES, **options)
    net = AutoregressiveWrapper(TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers))
    return Built(module=Step(net, lambda net, ids: net(ids), "adamw"), batches=tokens())


def rotary() -> Built:
    """Rotary positions, RMS norms and gated feed-forwards."""
    return autoregressive(rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True)


def alibi() -> Built:
    """Linear biases and grouped keys."""
    return autoregressive(alibi_pos_bias=True, attn_kv_heads=1)


def encoder() -> Built:
    """A class per sequence, of tokens with a mask."""
    from x_transformers import Encoder, TransformerWrapper

    net = TransformerWrapper(
        num_tokens=50, max_seq_len=16, attn_layers=Encoder(**SIZES), logits_dim=5, average_pool_embed=True
    )

    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        ids, mask, labels = batch
        return F.cross_entropy(net(ids, mask=mask), labels)

    batches = [(ids, ids % 7 != 0, ids[:, 0] % 5) for ids in tokens()]
    return Built(module=Step(net, loss), batches=batches)


def vision() -> Built:
    """Images to classes."""
    from x_transformers import Encoder, ViTransformerWrapper

    net = ViTransformerWrapper(image_size=32, patch_size=8, num_classes=5, attn_layers=Encoder(**SIZES))
    return Built(module=Step(net, lambda net, batch: F.cross_entropy(net(batch[0]), batch[1])), batches=images())


def sequence_to_sequence() -> Built:
    """Encoder and decoder in one module with its own loss."""
    from x_transformers import XTransformer

    sides: dict[str, Any] = {}
    for side in ("enc", "dec"):
        sides.update({f"{side}_{name}": value for name, value in SIZES.items() if name != "dim"})
        sides.update({f"{side}_num_tokens": 50, f"{side}_max_seq_len": 16})
    net = XTransformer(dim=16, **sides)
    batches = [(ids, ids[:, :6].contiguous()) for ids in tokens()]
    return Built(module=Step(net, lambda net, batch: net(*batch)), batches=batches)


MODELS: dict[str, Builder] = {
    "autoregressive": autoregressive,
    "rotary": rotary,
    "alibi": alibi,
    "encoder": encoder,
    "vision": vision,
    "sequence_to_sequence": sequence_to_sequence,
}
