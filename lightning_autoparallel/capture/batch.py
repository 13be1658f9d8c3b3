"""Which leaves of a batch carry the batch in dim 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from lightning_autoparallel.errors import CaptureError, ConfigError
from lightning_autoparallel.torch_compat.viewable import storage_of


@dataclass(frozen=True, kw_only=True)
class BatchLeaf:
    """One leaf of a local batch; ``shape`` and ``dtype`` are None for what is not a tensor."""

    path: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    batched: bool
    value: Any = None  # of a leaf that is not a tensor: a truth value or None, else its type's name
    requires_grad: bool = False  # of an argument of a module call, whose gradient goes on to earlier modules

    def global_shape(self, shards: int) -> tuple[int, ...]:
        """The leaf's shape in the batch of all ``shards`` together."""
        assert self.shape is not None
        return (self.shape[0] * shards, *self.shape[1:]) if self.batched else self.shape


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """All leaves of a local batch, in flattening order: equal layouts share a captured graph.

    ``structure`` spells the containers around them, ``refused`` says why there is no graph; both of module calls only.
    ``same`` has for each tensor the place of the first that is the same object, and is empty where all are different;
    ``sharing`` has the places of those that share memory with another one.
    """

    leaves: tuple[BatchLeaf, ...]
    same: tuple[int, ...] = ()
    sharing: frozenset[int] = frozenset()
    structure: str = ""
    refused: str = ""

    @property
    def tensors(self) -> tuple[BatchLeaf, ...]:
        """The leaves that are tensors."""
        return tuple(leaf for leaf in self.leaves if leaf.shape is not None)

    def __str__(self) -> str:
        return ", ".join(f"{leaf.path or 'batch'}: {_shown(leaf)}" for leaf in self.leaves)


def _shown(leaf: BatchLeaf) -> str:
    if leaf.shape is None:
        return f"{leaf.value!r}"
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}{' with gradient' * leaf.requires_grad}"


def describe_batch(
    leaves: Sequence[tuple[str, Any]], batch_dims: int | Mapping[str, int | None] | None = None
) -> BatchLayout:
    """The layout of one rank's batch: dim 0 of every tensor that has the local batch length is the batch.

    The local batch length is dim 0 of the first tensor that has a dim. ``batch_dims`` maps globs over leaf paths to 0
    (the batch) or None (replicated) where that guess is wrong.

    Raises:
        ConfigError: ``batch_dims`` names another dim than 0, or a leaf that does not exist.
    """
    overrides = _overrides(batch_dims, [path for path, _ in leaves])
    length = next((leaf.shape[0] for _, leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
    same, sharing = one_memory([leaf for _, leaf in leaves if isinstance(leaf, Tensor)])
    described = tuple(_leaf(path, leaf, length, overrides) for path, leaf in leaves)
    return BatchLayout(leaves=described, same=same, sharing=sharing)


def one_memory(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], frozenset[int]]:
    """``same`` and ``sharing`` of a layout of these tensors."""
    first: dict[int, int] = {}
    same = tuple(first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors))
    by_storage: dict[int, set[int]] = {}
    for place, tensor in enumerate(tensors):
        if same[place] == place and tensor.layout is torch.strided:
            by_storage.setdefault(storage_of(tensor), set()).add(place)
    sharing = frozenset().union(*(places for places in by_storage.values() if len(places) > 1))
    return (same if len(first) < len(tensors) else ()), sharing


def _leaf(path: str, leaf: Any, length: int | None, overrides: Mapping[str, int | None]) -> BatchLeaf:
    if not isinstance(leaf, Tensor):
        return BatchLeaf(path=path, shape=None, dtype=None, batched=False, value=_comparable(leaf))
    batched = leaf.dim() > 0 and leaf.shape[0] == length
    for glob, dim in overrides.items():
        if fnmatch(path, glob):
            batched = dim == 0
    return BatchLeaf(path=path, shape=tuple(leaf.shape), dtype=leaf.dtype, batched=batched)


def _comparable(leaf: Any) -> Any:
    # Others change with every batch: what the step decides by them is a guard.
    return leaf if isinstance(leaf, bool) or leaf is None else type(leaf).__name__


def row_positions(leaves: Sequence[tuple[str, Any]]) -> str | None:
    """What to say of whole numbers that may be positions of the rank's own rows (edges of a graph), if some are.

    They are of another length than the batch, so that they would be taken for equal on all ranks, and none is as
    large as the batch is long: in the global batch they would point at the first rank's rows.
    """
    tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    length = tensors[0][1].shape[0] if tensors else 0
    for path, leaf in tensors:
        whole = leaf.dtype in (torch.int32, torch.int64) and leaf.shape[0] != length and leaf.numel() > 0
        if whole and int(leaf.min()) >= 0 and int(leaf.max()) < length:
            return (
                f"batch leaf '{path or 'batch'}' of shape {list(leaf.shape)} may hold positions of the rank's own rows "
                f"({length}): the global batch has others; batch_dims={{'{path or '*'}': null}} says "
                "that it does not"
            )
    return None


def check_rows(leaves: Sequence[tuple[str, Any]], rows: int | None) -> str | None:
    """What to warn of where the batch's length, read off the first tensor, is not the ``rows`` that the loader gives.

    Raises:
        CaptureError: the first tensor has the loader's rows in dim 1, and another one has them in dim 0.
    """
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if rows is None or not shapes or next(iter(shapes.values()))[0] == rows:
        return None
    (path, shape), *others = shapes.items()
    said = f"batch leaf '{path or 'batch'}' has shape {list(shape)}, but its DataLoader gives batches of {rows} rows"
    if len(shape) > 1 and shape[1] == rows and any(other[0] == rows for _, other in others):
        raise CaptureError(
            f"{said}: its dim 1 is the batch, and only dim 0 can be divided; transpose it in collate_fn or in "
            f"on_after_batch_transfer, and back in the step"
        )
    return (
        f"{said}: dim 0 of this first tensor is taken for the batch all the same; if it is not, move the batch there, "
        f"or say so with batch_dims={{'{path or '*'}': null}}; batch_dims={{'{path or '*'}': 0}} says that it is"
    )


def _overrides(batch_dims: int | Mapping[str, int | None] | None, paths: list[str]) -> Mapping[str, int | None]:
    if batch_dims is None:
        return {}
    overrides = {"*": batch_dims} if isinstance(batch_dims, int) else dict(batch_dims)
    for glob, dim in overrides.items():
        if dim not in (0, None):
            raise ConfigError(f"batch_dims[{glob!r}]={dim}: only dim 0 can be the batch; move it there in the dataset")
        if not any(fnmatch(path, glob) for path in paths):
            raise ConfigError(f"batch_dims[{glob!r}] matches no leaf of the batch; leaves are {', '.join(paths)}")
    return overrides
