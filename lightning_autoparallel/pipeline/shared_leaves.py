"""Leaves of a batch that are as long as its rows, but that all batch shards hold alike: what ranks share, no rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from lightning_autoparallel.capture import BatchLayout
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.fx.values import fingerprint
from lightning_autoparallel.pipeline.stages import StageContext
from lightning_autoparallel.pipeline.step_calls import StepCall

_BITS = 40.0  # that values have to tell, lest shards hold equal ones by chance
_BITS_OF_A_NUMBER = 8.0  # of each different one that is not whole, and needs more than bfloat16's digits
_SAMPLED = 4096  # values that are looked at


def check_shared_leaves(
    context: StageContext,
    call: StepCall,
    layout: BatchLayout,
    leaves: Sequence[tuple[str, Any]],
    batch_dims: int | Mapping[str, int | None] | None,
) -> None:
    """Once per kind of batch: what is as long as the batch only by chance (4 anchors beside 4 rows) is no rows.

    Raises:
        CaptureError: on all ranks, if a leaf that ``batch_dims`` does not name has the same values on all batch shards,
            and another has not. A step that runs as it is written takes it for what it is.
    """
    if context.control.alone or call.local or call.common or context.mesh.data_parallel_size == 1:
        return
    batched = {leaf.path for leaf in layout.tensors if leaf.batched}
    rows = {path: leaf for path, leaf in leaves if path in batched and _is_plain(leaf)}
    everyone = context.control.gather({path: (fingerprint(leaf), is_telling(leaf)) for path, leaf in rows.items()})
    alike = [path for path in rows if len({theirs.get(path) for theirs in everyone}) == 1]
    if len(alike) == len(rows):  # one batch for all ranks, or one leaf
        return
    for path in alike:
        if everyone[0][path][1] and not _is_named(path, batch_dims):
            raise CaptureError(
                f"batch leaf '{path}' of shape {list(rows[path].shape)} is as long as the rank's rows, but all ranks "
                f"have the same values in it, and other rows: if they share it, set batch_dims={{'{path}': None}}; if "
                f"these are rows, batch_dims={{'{path}': 0}}"
            )


def _is_plain(leaf: Any) -> bool:
    is_plain = isinstance(leaf, Tensor) and leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_meta)
    return is_plain and leaf.numel() > 0


def _is_named(path: str, batch_dims: int | Mapping[str, int | None] | None) -> bool:
    globs = batch_dims if isinstance(batch_dims, Mapping) else () if batch_dims is None else ("*",)
    return any(fnmatch(path, glob) for glob in globs)


def is_telling(leaf: Tensor) -> bool:
    """Whether rows of such values would hardly be the same on two ranks: no masks, no few labels, no constants.

    Counted are the bits of their empirical entropy, and of each different value: of a whole number as many as it needs.
    """
    try:
        values = _sampled(leaf)
    except NotImplementedError:  # bits in a dtype that torch does not compute with
        return False
    if bool((values == values[:1]).all()):
        return False
    different, counts = values.unique(return_counts=True)
    if len(different) < 3:
        return False
    positions = torch.arange(len(values), dtype=values.dtype, device=values.device)
    if leaf.dim() == 1 and torch.equal(values.flatten(), positions):
        return True  # of rows, in order
    shares = counts / counts.sum()
    entropy = float(counts.sum() * -(shares * shares.log2()).sum())
    is_whole = different == different.round()
    whole_bits = float(different[is_whole].abs().log1p().sum() / math.log(2))
    drawn = int((different != different.bfloat16())[~is_whole].sum())
    return entropy + whole_bits + _BITS_OF_A_NUMBER * drawn >= _BITS


def _sampled(leaf: Tensor) -> Tensor:
    """Some values of up to 4,096 rows, the same of each; on the host, of shape [rows, values]."""
    rows = leaf.detach()[:_SAMPLED]
    rows = torch.view_as_real(rows.resolve_conj()) if rows.is_complex() else rows
    columns = rows.reshape(len(rows), -1)
    step = max(1, columns.numel() // _SAMPLED)
    return columns[:, ::step].to("cpu", torch.float64).nan_to_num()
