"""Llama 3 as Hugging Face's `LlamaForCausalLM` lays it out: its `config.json`, names, and order of rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_autoparallel.checkpoint import (
    CONFIG,
    Part,
    SafetensorsFolder,
    StoredSpec,
    StoredTensors,
    fill_parts,
    own_checkpoint,
)
from lightning_autoparallel.errors import CheckpointError
from lightning_autoparallel.models.llama3_config import LLAMA3_SIZES, Llama3Config, llama3_config

PREFIX = "model."  # of the network's names in Llama3Module
ROTATED = (".wq.weight", ".wk.weight")
_BLOCK = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_ROPE = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_seq_len": "original_max_position_embeddings",
}
# What Llama3 does; with another value Hugging Face's model computes something else.
_ONLY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0,
    "partial_rotary_factor": 1,
    "quantization_config": None,
}
# Those of transformers' LlamaConfig, which a config.json may leave out.
_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048}


def hugging_face_names(config: Llama3Config) -> dict[str, str]:
    """The name in Hugging Face's layout of each of `Llama3`'s parameters, in the network's order."""
    names = {"tok_embeddings.weight": "model.embed_tokens.weight"}
    for layer in range(config.n_layers):
        for ours, theirs in _BLOCK.items():
            names[f"layers.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
    names["norm.weight"] = "model.norm.weight"
    return names if config.tie_embeddings else {**names, "output.weight": "lm_head.weight"}


def in_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Rows (heads x head_dim, ...) of a query or key projection as `apply_rope` wants them, from Hugging Face's order.

    Both rotate pairs of rows of a head: neighbours here, there row i with row i + head_dim / 2.
    """
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def in_halves(rows: Tensor, head_dim: int) -> Tensor:
    """The inverse of `in_pairs`."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


class Llama3Folder(StoredTensors):
    """`Llama3`'s parameters in a folder of Hugging Face's layout.

    Raises:
        CheckpointError: the files cannot be read, or `config.json` is that of another network: names each difference.
        ConfigError: the package safetensors is missing.
    """

    def __init__(self, path: str, config: Llama3Config) -> None:
        self.source = path
        differing = list(_differences(config_of(path), config))
        if differing:
            raise CheckpointError(
                f"{path} is not the network that the module is configured for: {'; '.join(differing)} (Llama3Module "
                "takes size and overrides)"
            )
        self._folder = SafetensorsFolder(path)
        self._names, self._head_dim = hugging_face_names(config), config.head_dim
        ours = {theirs: name for name, theirs in self._names.items()}
        # a tied output may be stored twice, and old files hold what is computed
        ignored = ("rotary_emb.inv_freq", *(("lm_head.weight",) if config.tie_embeddings else ()))
        self.specs = {
            ours.get(theirs, theirs): spec
            for theirs, spec in self._folder.specs.items()
            if not theirs.endswith(ignored)
        }

    def called(self, name: str) -> str:
        """Hugging Face's name."""
        return self._names.get(name, name)

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """As `StoredTensors.fill`."""
        fill_parts(self._read, targets)

    def _read(self, name: str, part: Part) -> Tensor:
        read = partial(self._folder.read, self._names[name])
        return _rows_of_heads(read, part, self._head_dim) if name.endswith(ROTATED) else read(part)


def _rows_of_heads(read: Callable[[Part], Tensor], part: Part, head_dim: int) -> Tensor:
    """A part of a projection's rows in our order, from the whole heads that it touches."""
    rows, *others = part
    first, last = rows.start // head_dim * head_dim, -(-rows.stop // head_dim) * head_dim
    return in_pairs(read((slice(first, last), *others)), head_dim)[rows.start - first : rows.stop - first]


def llama3_weights(path: str, config: Llama3Config) -> StoredTensors:
    """The network's parameters in a folder of Hugging Face's layout, or in a checkpoint of `Llama3Module`.

    Raises:
        CheckpointError: there are none, or those of another network.
        ConfigError: the package safetensors is missing.
    """
    if (Path(path) / CONFIG).is_file():
        return Llama3Folder(path, config)
    if Path(path).is_dir() and any(Path(path).glob("*.safetensors*")):
        raise CheckpointError(f"{path} has no {CONFIG}, which says how the tensors are to be used")
    found = own_checkpoint(path, PREFIX)
    saved = checkpoint_config(found.checkpoint)
    differing = [] if saved is None else list(_differences(saved, config))
    if differing:
        raise CheckpointError(f"{path} is not the network that the module is configured for: {'; '.join(differing)}")
    return found


def checkpoint_config(checkpoint: Mapping[str, Any]) -> Llama3Config | None:
    """The network that a checkpoint of `Llama3Module` holds, or None if it does not say."""
    given = checkpoint.get("hyper_parameters", {})
    return llama3_config(given["size"], given.get("overrides")) if "size" in given else None


def config_of(path: str) -> Llama3Config:
    """What a folder's `config.json` says.

    Raises:
        CheckpointError: there is none, or `Llama3` does not compute what it says.
        ConfigError: its values do not fit each other.
    """
    file = Path(path) / CONFIG
    try:
        found: dict[str, Any] = {**_DEFAULTS, **json.loads(file.read_text())}
        given = {**_ONLY, **{key: found[key] for key in _ONLY if found.get(key) is not None}}
        refused = [f"{key}={given[key]!r}" for key, known in _ONLY.items() if given[key] != known]
        rope = _rope(found)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3"):
            refused.append(f"rope_type={kind!r}")
        if found.get("head_dim") not in (None, found["hidden_size"] // found["num_attention_heads"]):
            refused.append(f"head_dim={found['head_dim']!r}")
        if refused:
            raise CheckpointError(f"{file} is no network that Llama3 computes: {', '.join(refused)}")
        scaling = {ours: rope[theirs] for ours, theirs in _ROPE.items()} if kind == "llama3" else {}
        return Llama3Config(
            dim=found["hidden_size"],
            n_layers=found["num_hidden_layers"],
            n_heads=found["num_attention_heads"],
            n_kv_heads=found.get("num_key_value_heads") or found["num_attention_heads"],
            vocab_size=found["vocab_size"],
            norm_eps=found["rms_norm_eps"],
            rope_theta=rope.get("rope_theta", found.get("rope_theta", 10000.0)),
            rope_scaling=kind == "llama3",
            max_seq_len=found["max_position_embeddings"],
            tie_embeddings=found["tie_word_embeddings"],
            **_width(found["hidden_size"], found["intermediate_size"]),
            **scaling,
        )
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no {file}: give a folder in Hugging Face's layout") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} does not describe a LLaMA: {type(error).__name__}: {error}") from error


def _rope(found: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters`, or `rope_scaling` as it was called before transformers 5."""
    return dict(found.get("rope_parameters") or found.get("rope_scaling") or {})


def _width(dim: int, ffn_dim: int) -> dict[str, Any]:
    """Fields whose `ffn_dim` is this: those of a published size, or a multiplier that is truncated to it."""
    for known in LLAMA3_SIZES.values():
        if (known.dim, known.ffn_dim) == (dim, ffn_dim):
            return {"ffn_dim_multiplier": known.ffn_dim_multiplier, "multiple_of": known.multiple_of}
    return {"ffn_dim_multiplier": (ffn_dim + 0.5) / int(2 * 4 * dim / 3), "multiple_of": 1}


def hugging_face_config(config: Llama3Config, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json` for a network, with rotary embedding as every version of transformers since 4.43 reads it."""
    scaling = {theirs: getattr(config, ours) for ours, theirs in _ROPE.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": {"rope_type": "llama3", **scaling} if config.rope_scaling else None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def token_ids(config: Llama3Config) -> dict[str, int | None]:
    """`config.json`'s begin and end of a text: those of Llama 3's tokenizer, or None as others are not known."""
    known = config.vocab_size == LLAMA3_SIZES["8B"].vocab_size
    return {"bos_token_id": 128000 if known else None, "eos_token_id": 128001 if known else None}


def hugging_face_specs(config: Llama3Config, stored: StoredTensors, dtype: torch.dtype) -> dict[str, StoredSpec]:
    """What is exported, by Hugging Face's names.

    Raises:
        CheckpointError: a parameter of the network is missing.
    """
    names = hugging_face_names(config)
    missing = [name for name in names if name not in stored.specs]
    if missing:
        raise CheckpointError(f"{stored.source} has no {', '.join(missing[:12])}: it is no checkpoint of Llama3Module")
    return {theirs: StoredSpec(stored.specs[ours].shape, dtype) for ours, theirs in names.items()}


def size_and_overrides(config: Llama3Config) -> tuple[str, dict[str, Any]]:
    """Arguments of `Llama3Module` for a network: the published size that is nearest, and what differs from it."""
    values = asdict(config)
    differing = {
        size: {key: value for key, value in values.items() if value != getattr(known, key)}
        for size, known in LLAMA3_SIZES.items()
    }
    size = min(differing, key=lambda name: len(differing[name]))
    return size, differing[size]


def _differences(found: Llama3Config, wanted: Llama3Config) -> Iterable[str]:
    """Where two networks differ in what they compute; `max_seq_len` only says what they refuse."""
    keys = ["dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "ffn_dim", "norm_eps", "rope_theta"]
    keys += ["rope_scaling", "tie_embeddings", *(_ROPE if found.rope_scaling and wanted.rope_scaling else ())]
    for key in keys:
        if getattr(found, key) != getattr(wanted, key):
            yield f"{key} is {getattr(found, key)} there and {getattr(wanted, key)} in the module"
