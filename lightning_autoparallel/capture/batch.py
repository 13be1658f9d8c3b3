"""Batches of any nesting as flat leaves, and which of them carry the batch in dim 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from lightning_autoparallel.errors import ConfigError

Rebuild = Callable[[list[Any]], Any]


@dataclass(frozen=True, kw_only=True)
class BatchLeaf:
    """One leaf of a local batch; ``shape`` and ``dtype`` are None for what is not a tensor."""

    path: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    batched: bool
    value: Any = None  # of a leaf that is not a tensor: a truth value or None, else its type's name

    def global_shape(self, shards: int) -> tuple[int, ...]:
        """The leaf's shape in the batch of all ``shards`` together."""
        assert self.shape is not None
        return (self.shape[0] * shards, *self.shape[1:]) if self.batched else self.shape


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """All leaves of a local batch, in flattening order: equal layouts share a captured graph."""

    leaves: tuple[BatchLeaf, ...]

    @property
    def tensors(self) -> tuple[BatchLeaf, ...]:
        """The leaves that are tensors."""
        return tuple(leaf for leaf in self.leaves if leaf.shape is not None)

    def __str__(self) -> str:
        return ", ".join(f"{leaf.path or 'batch'}: {_shown(leaf)}" for leaf in self.leaves)


def _shown(leaf: BatchLeaf) -> str:
    return f"{leaf.value!r}" if leaf.shape is None else f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"


def flatten_batch(batch: Any) -> tuple[list[tuple[str, Any]], Rebuild]:
    """The leaves of ``batch`` with their paths (``"inputs.0"``), and a function that puts new leaves back.

    Mappings, sequences, named tuples and dataclasses are containers; everything else is a leaf.
    """
    children = _children(batch)
    if children is None:
        return [("", batch)], lambda leaves: leaves[0]
    keys, items, build = children
    parts = [flatten_batch(item) for item in items]
    leaves = [
        (f"{key}.{path}" if path else str(key), leaf)
        for key, part in zip(keys, parts, strict=True)
        for path, leaf in part[0]
    ]

    def rebuild(values: list[Any]) -> Any:
        rebuilt, start = [], 0
        for part_leaves, part_rebuild in parts:
            rebuilt.append(part_rebuild(values[start : start + len(part_leaves)]))
            start += len(part_leaves)
        return build(rebuilt)

    return leaves, rebuild


def _children(value: Any) -> tuple[list[Any], list[Any], Rebuild] | None:
    if isinstance(value, Mapping):
        keys = list(value)
        return (
            keys,
            [value[key] for key in keys],
            lambda items: _mapping_like(value, dict(zip(keys, items, strict=True))),
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(value._fields), list(value), lambda items: type(value)(*items)
    if isinstance(value, (list, tuple)):
        return list(range(len(value))), list(value), type(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return (
            names,
            [getattr(value, name) for name in names],
            lambda items: dataclasses.replace(value, **dict(zip(names, items, strict=True))),
        )
    return None


def _mapping_like(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    return items if type(original) is dict else type(original)(items)  # type: ignore[call-arg]


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
    return BatchLayout(leaves=tuple(_leaf(path, leaf, length, overrides) for path, leaf in leaves))


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
