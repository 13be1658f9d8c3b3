"""Llama 3 from Hugging Face's layout into a checkpoint, and back; without processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_autoparallel.checkpoint import CONFIG, StoredTensors, own_checkpoint, save_weights, write_safetensors
from lightning_autoparallel.checkpoint.matching import match_names
from lightning_autoparallel.errors import CheckpointError
from lightning_autoparallel.models.llama3 import Llama3
from lightning_autoparallel.models.llama3_config import Llama3Config
from lightning_autoparallel.models.llama3_hugging_face import (
    PREFIX,
    ROTATED,
    Llama3Folder,
    checkpoint_config,
    config_of,
    hugging_face_config,
    hugging_face_names,
    hugging_face_specs,
    in_halves,
    size_and_overrides,
    token_ids,
)

# Beside the weights, what a published folder has of its tokenizer and for generation.
_COPIED = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "chat_template*", "vocab*", "merges.txt")


def import_hugging_face(folder: str, out: str, as_folder: bool | None = None) -> tuple[str, dict[str, Any]]:
    """Write a LLaMA in Hugging Face's layout as a checkpoint of `Llama3Module` that holds weights only.

    Args:
        as_folder: see `save_weights`.

    Returns:
        `size` and `overrides` of the `Llama3Module` that takes it.

    Raises:
        CheckpointError: the folder cannot be read, is another network than `Llama3` or not whole, or something else is
            at `out`.
        ConfigError: the package safetensors is missing.
    """
    config = config_of(folder)
    stored = Llama3Folder(folder, config)
    _check_whole(stored, config)
    size, overrides = size_and_overrides(config)
    save_weights(stored, PREFIX, {"size": size, "overrides": overrides}, out, as_folder)
    return size, overrides


def _check_whole(stored: StoredTensors, config: Llama3Config) -> None:
    with torch.device("meta"):
        match_names(Llama3(config), stored, into="", strict=True)


def export_hugging_face(
    checkpoint: str,
    folder: str,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 * 10**9,
    files_from: str | None = None,
    weights_only: bool | None = None,
) -> None:
    """Write a checkpoint of `Llama3Module` as `transformers.AutoModelForCausalLM.from_pretrained` reads it.

    Args:
        checkpoint: a file or a folder of shards, with optimizers or without.
        folder: is made; nothing may be in it.
        dtype: of all tensors; as they are stored if None.
        max_file_bytes: of one safetensors file, which is also what is held in memory at once.
        files_from: a folder whose tokenizer and other keys of `config.json` are copied.
        weights_only: as for `torch.load`.

    Raises:
        CheckpointError: the checkpoint cannot be read or is not that of a `Llama3Module`, or `folder` is not empty.
        ConfigError: the package safetensors is missing.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{folder} is there and not empty: remove it or choose another name")
    stored = own_checkpoint(checkpoint, PREFIX, weights_only)
    config = checkpoint_config(stored.checkpoint)
    if config is None:
        raise CheckpointError(
            f"{checkpoint} does not say which network it holds: it has no hyper_parameters with the size, as "
            "Llama3Module saves them"
        )
    dtypes = [spec.dtype for spec in stored.specs.values() if isinstance(spec.dtype, torch.dtype)]
    wanted = dtype or reduce(torch.promote_types, dtypes, torch.bfloat16 if not dtypes else dtypes[0])
    specs = hugging_face_specs(config, stored, wanted)
    ours = {theirs: name for name, theirs in hugging_face_names(config).items()}

    def make(names: Sequence[str]) -> Mapping[str, Tensor]:
        return {name: _exported(ours[name], stored, config, wanted) for name in names}

    writing = target.with_name(f".{target.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    others = {} if files_from is None else _copied(Path(files_from), writing)
    described = {**token_ids(config), **others, **hugging_face_config(config, wanted)}
    (writing / CONFIG).write_text(json.dumps(described, indent=2) + "\n")
    write_safetensors(writing, specs, make, max_file_bytes)
    if target.exists():
        target.rmdir()
    writing.rename(target)


def _exported(name: str, stored: StoredTensors, config: Llama3Config, dtype: torch.dtype) -> Tensor:
    spec = stored.specs[name]
    whole = torch.empty(spec.shape, dtype=dtype)
    stored.fill({name: whole})
    return in_halves(whole, config.head_dim).contiguous() if name.endswith(ROTATED) else whole


def _copied(source: Path, target: Path) -> dict[str, Any]:
    """Copy a tokenizer's files; the keys of `config.json` that say nothing about the network."""
    files = {file for pattern in _COPIED for file in source.glob(pattern) if file.is_file()}
    for file in sorted(files):
        shutil.copyfile(file, target / file.name)
    config = source / CONFIG
    found: dict[str, Any] = json.loads(config.read_text()) if config.is_file() else {}
    if not files and not found:
        raise CheckpointError(f"{source} has no {CONFIG} and no tokenizer to copy")
    return {key: value for key, value in found.items() if key not in ("rope_parameters", "dtype")}
