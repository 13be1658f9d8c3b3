"""How each model of `models.py` is cut over tp: a `rules` mapping per model, as users write it.

Most cut a layer by columns and the next by rows; some pin values at the edges of modules besides (sequence parallel),
some cut weights that do not meet, so that values have to be redistributed in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Rules = Mapping[str, Mapping[str, str]]

_COLUMN, _ROW, _ROWS_OF_BATCH, _SEQUENCE = {"tp": "S(0)"}, {"tp": "S(1)"}, {"tp": "S(0)"}, {"tp": "S(1)"}

RULES: dict[str, Rules] = {
    "llama3": {
        "*tok_embeddings.weight": _COLUMN,
        "*.attention.w[qkv].weight": _COLUMN,
        "*.attention.wo.weight": _ROW,
        "*.feed_forward.w[13].weight": _COLUMN,
        "*.feed_forward.w2.weight": _ROW,
        "*output.weight": _COLUMN,
        "outputs:*.attention": _SEQUENCE,
        "outputs:*.feed_forward": _SEQUENCE,
    },
    "hf_llama": {
        "*embed_tokens.weight": _COLUMN,
        "*self_attn.[qkv]_proj.weight": _COLUMN,
        "*self_attn.o_proj.weight": _ROW,
        "*mlp.gate_proj.weight": _COLUMN,
        "*mlp.up_proj.weight": _COLUMN,
        "*mlp.down_proj.weight": _ROW,
        "*lm_head.weight": _COLUMN,
        "inputs:*layers.*.input_layernorm": _SEQUENCE,
        "inputs:*layers.*.post_attention_layernorm": _SEQUENCE,
    },
    # Its Conv1D keeps weights as (in, out); query, key and value are one weight, which two ranks cut within the keys.
    "hf_gpt2": {
        "*.wte.weight": {"tp": "S(0)"},
        "*.attn.c_attn.weight": {"tp": "S(1)"},
        "*.attn.c_attn.bias": {"tp": "S(0)"},
        "*.attn.c_proj.weight": {"tp": "S(0)"},
        "*.mlp.c_fc.weight": {"tp": "S(1)"},
        "*.mlp.c_fc.bias": {"tp": "S(0)"},
        "*.mlp.c_proj.weight": {"tp": "S(0)"},
    },
    # Attention over the encoder splits its packed weight, which is not gathered: only self-attention is cut in it.
    "transformer": {
        "model.embedding.weight": _ROW,  # columns of the table: every rank looks up half of each vector
        "*.self_attn.in_proj_weight": _COLUMN,
        "*.self_attn.in_proj_bias": _COLUMN,
        "*out_proj.weight": _ROW,
        "*linear1.weight": _COLUMN,
        "*linear1.bias": _COLUMN,
        "*linear2.weight": _ROW,
        "model.decoder.weight": _COLUMN,
        "model.decoder.bias": _COLUMN,
    },
    "attention": {
        "query.*": _COLUMN,
        "key_value.*": _COLUMN,
        "output.weight": _ROW,
    },
    # The table is the output layer too: both uses are cut alike.
    "tied": {
        "embedding.weight": _COLUMN,
        "hidden.weight": _ROW,
        "outputs:hidden": _SEQUENCE,
    },
    # Weights alone: the bias stays whole, and ranks that count different targets share one vocabulary.
    "ignore_index": {"embedding.weight": _COLUMN, "hidden.weight": _COLUMN},
    "checkpointed": {
        "first.0.weight": _COLUMN,
        "first.0.bias": _COLUMN,
        "first.2.weight": _ROW,
        "second.0.weight": _COLUMN,
        "second.2.weight": _COLUMN,
    },
    # Each rank has some of the experts.
    "experts": {"up": _COLUMN, "down": _COLUMN, "head.weight": _COLUMN},
    "boring": {"layer.weight": _ROW},
    # Convolutions compute with whole weights; what follows them is cut.
    "convnet": {"head.weight": _ROW, "outputs:features": {"tp": "S(1)"}},
    # Nothing in it divides by two but the batch: tp shares out the rows of its data-parallel rank.
    "odd": {"outputs:net.0": _ROWS_OF_BATCH},
}
RULES["transformer32"] = RULES["transformer"]


def plan_of(model: str, name: str) -> str | dict[str, Any]:
    """The plan argument for a case: a plan's own name, or `rules` on fsdp and `hsdp_rules` on hsdp.

    `stored` has tp cut what is computed whole, between steps, and the values of the model's own rules.
    """
    if name == "stored":
        edges = {key: placed for key, placed in RULES[model].items() if key.startswith(("outputs:", "inputs:"))}
        return {"rules": {"stored:*": {"tp": "S(0)"}, **edges}}
    if name not in BASES:
        return name
    return {"base": BASES[name], "rules": RULES[model]}


BASES = {"rules": "fsdp", "hsdp_rules": "hsdp", "ddp_rules": "ddp"}
