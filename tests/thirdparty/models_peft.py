"""Adapters of peft on a small decoder: most weights are frozen."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.thirdparty.built import Builder, Built, Step, tokens
from tests.thirdparty.models_transformers import GROUPED, WITHOUT_SPECIAL, hugging_face, own_loss


def adapted(kind: str, **options: Any) -> Built:
    """A LLaMA with one of peft's adapters."""
    import peft

    net = hugging_face("LlamaForCausalLM", "LlamaConfig", {**GROUPED, **WITHOUT_SPECIAL})
    net = peft.get_peft_model(net, getattr(peft, kind)(task_type="CAUSAL_LM", **options))
    batches = [{"input_ids": ids, "labels": ids} for ids in tokens()]
    return Built(module=Step(net, own_loss, "adamw"), batches=batches)


LORA = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}

MODELS: dict[str, Builder] = {
    "lora": partial(adapted, "LoraConfig", **LORA),
    "dora": partial(adapted, "LoraConfig", **LORA, use_dora=True),
    "ia3": partial(
        adapted, "IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "prefix": partial(adapted, "PrefixTuningConfig", num_virtual_tokens=2),
    "prompt": partial(adapted, "PromptTuningConfig", num_virtual_tokens=2),
}
