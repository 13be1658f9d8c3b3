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
_LOOKS = 8  # batches of a kind that are looked at, while a leaf is alike without telling anything


class SharedLeaves:
    """Looks in the first batches of a kind for what is as long as their rows by chance (4 anchors beside 4 rows)."""

    def __init__(self, context: StageContext, batch_dims: int | Mapping[str, int | None] | None) -> None:
        self._context, self._batch_dims = context, batch_dims
        self._left: dict[Any, int] = {}  # batches of a kind that are looked at yet; equal on all ranks

    def are_watched(self, call: StepCall, layout: BatchLayout) -> bool:
        """Whether batches of this kind have leaves that are alike, but may be so by chance."""
        return bool(self._left) and (call.name, layout) in self._left

    def check(self, call: StepCall, layout: BatchLayout, leaves: Sequence[tuple[str, Any]]) -> None:
        """Compare the leaves that are taken for rows; all ranks come with one kind of batch.

        Raises:
            CaptureError: on all ranks, if one that ``batch_dims`` does not name has the same values on all batch
                shards, and another has not. A step that runs as it is written takes it for what it is.
        """
        control, kind = self._context.control, (call.name, layout)
        if control.alone or call.local or call.common or self._context.mesh.data_parallel_size == 1:
            return
        batched = {leaf.path for leaf in layout.tensors if leaf.batched}
        rows = {path: leaf for path, leaf in leaves if path in batched and _is_plain(leaf)}
        everyone = control.gather({path: (fingerprint(leaf), is_telling(leaf)) for path, leaf in rows.items()})
        alike = [path for path in rows if len({theirs.get(path) for theirs in everyone}) == 1]
        doubtful = [path for path in alike if not _is_named(path, self._batch_dims)]
        if len(alike) == len(rows):  # one batch for all ranks, or one leaf
            doubtful = []
        left = self._left.pop(kind, _LOOKS) - 1
        for path in [path for path in doubtful if everyone[0][path][1]]:
            raise CaptureError(
                f"batch leaf '{path}' of shape {list(rows[path].shape)} is as long as the rank's rows, but all ranks "
                f"have the same values in it, and other rows: if they share it, set batch_dims={{'{path}': None}}; if "
                f"these are rows, batch_dims={{'{path}': 0}}"
            )
        if left and any(rows[path].dtype is not torch.bool for path in doubtful):
            self._left[kind] = left


def _is_plain(leaf: Any) -> bool:
    is_plain = isinstance(leaf, Tensor) and leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_meta)
    return is_plain and leaf.numel() > 0


def _is_named(path: str, batch_dims: int | Mapping[str, int | None] | None) -> bool:
    globs = batch_dims if isinstance(batch_dims, Mapping) else () if batch_dims is None else ("*",)
    return any(fnmatch(path, glob) for glob in globs)


def is_telling(leaf: Tensor) -> bool:
    """Whether rows of such values would hardly be the same on two ranks: no masks of padding, few labels, constants.

    Counted are the bits of their empirical entropy, and of each different value: of a whole number as many as it needs.
    """
    try:
        values = _sampled(leaf)
    except NotImplementedError:  # bits in a dtype that torch does not compute with
        return False
    if bool((values == values[:1]).all()):
        return False
    different, counts = values.unique(return_counts=True)
    if len(different) == 2 and int((values[:, 1:] != values[:, :-1]).sum(1).max()) < 2:
        return False  # labels of rows, or masks of what is behind their ends
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
