"""What one rank does for all: its failure is everybody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_autoparallel.errors import CheckpointError


def first_rank_runs(action: Callable[[], None], group: Any = None) -> None:
    """Call ``action`` on rank 0 while all ranks of ``group`` wait.

    Raises:
        CheckpointError: on all ranks, if it raised on rank 0.
    """
    error = _error_of(action) if not dist.is_initialized() or dist.get_rank() == 0 else None
    said = [None if error is None else _said(error)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(said, 0, group=group)
    if said[0] is not None:
        raise CheckpointError(said[0] if error is not None else f"rank 0 has failed: {said[0]}") from error


def _error_of(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except Exception as error:  # raised again, on every rank
        return error
    return None


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
