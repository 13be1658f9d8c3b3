"""A folder of shards as one file, as one device writes it; without processes, in the memory of one copy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from lightning_autoparallel.checkpoint.location import Location
from lightning_autoparallel.checkpoint.optimizers import numbered, room_for
from lightning_autoparallel.checkpoint.sharded import MODEL, OPTIMIZER, opened
from lightning_autoparallel.checkpoint.single_file import write_file
from lightning_autoparallel.errors import CheckpointError
from lightning_autoparallel.torch_compat.dcp import LoadPlanner, put

_OPTIMIZER = re.compile(OPTIMIZER.format(r"(\d+)"))


def consolidate(folder: str, file: str, weights_only: bool | None = None) -> None:
    """Write what the sharded checkpoint in ``folder`` holds to ``file``, in the layout of Lightning's own files.

    Args:
        weights_only: as for ``torch.load``.

    Raises:
        CheckpointError: there is no complete sharded checkpoint, or ``file`` is a folder.
    """
    if Path(file).is_dir():
        raise CheckpointError(f"{file} is a folder: name a file")
    reader, metadata, trainer_state = opened(Location(folder), weights_only)
    state: dict[str, Any] = {}
    for flat, path in (metadata.planner_data or {}).items():
        put(state, path, room_for(metadata.state_dict_metadata[flat]))
    dcp.load(state, storage_reader=reader, planner=LoadPlanner(weights_only), no_dist=True)
    optimizers = sorted((key for key in state if _OPTIMIZER.fullmatch(key)), key=lambda key: int(key.split("_")[1]))
    whole = {**trainer_state, "state_dict": state[MODEL]}
    if optimizers:
        names = {key: [group["params"] for group in state[key]["param_groups"]] for key in optimizers}
        whole["optimizer_states"] = [numbered(state[key], names[key]) for key in optimizers]
    write_file(whole, Location(file))
