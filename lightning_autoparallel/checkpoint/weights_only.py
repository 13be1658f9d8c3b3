"""A checkpoint that holds a model and nothing to resume: what weights from outside are turned into."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_autoparallel.checkpoint.location import Location
from lightning_autoparallel.checkpoint.sharded import MODEL, save_folder
from lightning_autoparallel.checkpoint.single_file import write_file
from lightning_autoparallel.checkpoint.size import FILE_LIMIT_BYTES
from lightning_autoparallel.checkpoint.stored import StoredTensors
from lightning_autoparallel.errors import CheckpointError
from lightning_autoparallel.lightning_compat import LIGHTNING_VERSION
from lightning_autoparallel.torch_compat.dcp import MadeWhenWritten


def save_weights(
    stored: StoredTensors, prefix: str, hyper_parameters: Mapping[str, Any], out: str, as_folder: bool | None = None
) -> bool:
    """Write stored tensors as a checkpoint with names that begin with ``prefix``; whether it is a folder.

    Args:
        hyper_parameters: of the LightningModule, for ``load_from_checkpoint``.
        as_folder: a folder, in the memory of one tensor, or one file, in that of one copy; as the strategy chooses by
            the size if None.

    Raises:
        CheckpointError: something else is at ``out``.
    """
    specs = {f"{prefix}{name}": spec for name, spec in stored.specs.items()}
    on_meta = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}  # type: ignore[arg-type]

    def made(name: str) -> torch.Tensor:
        tensor = torch.empty_like(on_meta[name], device="cpu")
        stored.fill({name.removeprefix(prefix): tensor})
        return tensor

    beside = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": LIGHTNING_VERSION,
        "hparams_name": "kwargs",
        "hyper_parameters": dict(hyper_parameters),
    }
    size = sum(tensor.numel() * tensor.element_size() for tensor in on_meta.values())
    if size > FILE_LIMIT_BYTES if as_folder is None else as_folder:
        planner = MadeWhenWritten(lambda name: made(name.removeprefix(f"{MODEL}.")))
        save_folder({MODEL: on_meta}, beside, Location(out), planner=planner)
        return True
    if Path(out).is_dir():
        raise CheckpointError(f"{out} is a folder: name a file")
    write_file({**beside, "state_dict": {name: made(name) for name in on_meta}}, Location(out))
    return False
