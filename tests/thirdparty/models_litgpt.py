"""GPTs of litgpt: one class, many configurations."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.thirdparty.built import Builder, Built, Step, tokens

SIZES: dict[str, Any] = {"block_size": 16, "vocab_size": 50, "padding_multiple": 10, "n_layer": 2, "n_head": 4}
LLAMA = {
    "n_embd": 16,
    "n_query_groups": 2,
    "rotary_percentage": 1.0,
    "parallel_residual": False,
    "bias": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "intermediate_size": 24,
}


def gpt(lora: bool = False, **options: Any) -> Built:
    """Next-token training with litgpt's chunked loss; with `lora` only its low-rank weights train."""
    from litgpt.utils import chunked_cross_entropy

    if lora:
        from litgpt.lora import GPT, Config, mark_only_lora_as_trainable
    else:
        from litgpt.model import GPT, Config
    net = GPT(Config(**SIZES, **options))
    if lora:
        mark_only_lora_as_trainable(net)

    def loss(net: Any, ids: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(net(ids[:, :-1]), ids[:, 1:], chunk_size=0)

    return Built(module=Step(net, loss, "adamw"), batches=tokens())


MODELS: dict[str, Builder] = {
    "pythia": partial(gpt, n_embd=16),
    "llama": partial(gpt, **LLAMA),
    "mixture": partial(gpt, **{**LLAMA, "mlp_class_name": "LLaMAMoE"}, n_expert=4, n_expert_per_token=2),
    "lora": partial(gpt, lora=True, lora_r=2, lora_query=True, lora_value=True, **LLAMA),
}
