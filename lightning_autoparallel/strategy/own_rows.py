"""A prediction without the rows of other ranks that filled up its batch."""

from __future__ import annotations

import copy
import dataclasses
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy
from torch import Tensor

from lightning_autoparallel.torch_compat.tree import tree_flatten, tree_map

RowDim = Callable[[Tensor], int | None]
_PLAIN = (str, bytes, numbers.Number, numpy.generic)


class OwnRows:
    """Takes the last ``spare`` of ``rows`` rows off what a step returns for a batch; ``cut`` it, once.

    Tensors, arrays and data frames have the rows of the batch where they are as long; so have lists and tuples, what
    they hold is then of one row each and stays as it is. Containers of results (a dict, a tuple of logits and labels)
    are told from those by what they hold: of several kinds, or each with all of the rows.

    Args:
        row_dims: of a captured step, in which dim a tensor has the rows, or None; nothing is left to guess then.
    """

    def __init__(self, rows: int, spare: int, batch: Any, row_dims: RowDim | None) -> None:
        self._rows, self._spare, self._row_dims = rows, spare, row_dims
        self._of_batch = _lists(batch, rows)
        self.are_found = False  # whether anything had the rows of the batch
        self.doubts: list[str] = []  # what may hold rows of other ranks still, or one too few

    def cut(self, output: Any) -> Any:
        """``output`` without the spare rows."""
        own = self._cut(output)
        if not self.are_found and not self.doubts:
            self.doubts.append(_shown(output))
        return own

    def _cut(self, part: Any) -> Any:
        return tree_map(self._own, part, is_leaf=self._is_leaf)

    def _own(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            dim = self._row_dim(leaf)
            return self._left(leaf) if dim is None else leaf.narrow(dim, 0, self._found(leaf.shape[dim]))
        if isinstance(leaf, (list, tuple)):
            return leaf[: self._found(len(leaf))] if self._is_by_row(leaf) else self._left(leaf)
        if isinstance(leaf, numpy.ndarray) and self._is_as_long(leaf):
            return leaf[: self._found(len(leaf))]
        if hasattr(leaf, "iloc") and self._is_as_long(leaf):  # pandas
            return leaf.iloc[: self._found(len(leaf))]
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            return self._of_fields(leaf)
        return self._left(leaf)

    def _found(self, length: int) -> int:
        self.are_found = True
        return length - self._spare

    def _left(self, leaf: Any) -> Any:
        if not _counts_no_rows(leaf):
            self.doubts.append(_shown(leaf))
        return leaf

    def _of_fields(self, record: Any) -> Any:
        own = copy.copy(record)
        frozen = record.__dataclass_params__.frozen
        for field in dataclasses.fields(record):
            assign = object.__setattr__ if frozen else setattr
            assign(own, field.name, self._cut(getattr(record, field.name)))
        return own

    def _row_dim(self, tensor: Tensor) -> int | None:
        if self._row_dims is None:
            return 0 if self._is_as_long(tensor) else None
        dim = self._row_dims(tensor)
        return dim if dim is not None and tensor.shape[dim] == self._rows else None

    def _is_as_long(self, part: Any) -> bool:
        return getattr(part, "ndim", 1) > 0 and len(part) == self._rows

    def _is_leaf(self, part: Any) -> bool:
        """Whether nothing inside is looked at: it has one entry for each row, or nobody can tell which are whose."""
        if isinstance(part, Mapping):
            return not all(isinstance(key, str) for key in part) and not all(map(self._has_rows, part.values()))
        if not isinstance(part, (list, tuple)) or hasattr(part, "_fields") or not part:
            return False
        if self._is_by_row(part):
            return True
        if all(isinstance(item, _PLAIN) for item in part):
            return isinstance(part, list)
        return all(isinstance(item, Mapping) for item in part) and not all(map(self._has_rows, part))

    def _is_by_row(self, part: list[Any] | tuple[Any, ...]) -> bool:
        """Whether each entry of a list or tuple is of one row."""
        if len(part) != self._rows:
            return False
        if all(isinstance(item, _PLAIN) for item in part) and part in self._of_batch:
            return True
        if len({_kind(item) for item in part} - {None}) > 1:
            return False
        if self._row_dims is not None:
            return not any(isinstance(leaf, Tensor) for leaf in tree_flatten(part)[0])
        if isinstance(part, tuple):
            return not all(self._has_rows(item) or isinstance(item, numbers.Number) for item in part)
        if all(self._has_rows(item) and not isinstance(item, list) for item in part):
            self.doubts.append(f"a list of {len(part)} results, taken for one of each row, that have as many rows each")
        return True

    def _has_rows(self, part: Any) -> bool:
        if isinstance(part, Mapping):
            return any(map(self._has_rows, part.values()))
        if isinstance(part, Tensor):
            return self._row_dim(part) is not None
        return isinstance(part, (list, numpy.ndarray)) and self._is_as_long(part)


def _lists(batch: Any, rows: int) -> list[Any]:
    """The lists and tuples of strings or numbers in a batch that have one for each row."""
    found: list[Any] = []

    def is_row_list(part: Any) -> bool:
        is_one = isinstance(part, (list, tuple)) and len(part) == rows
        if is_one and all(isinstance(item, (str, int, float)) for item in part):
            found.append(part)
            return True
        return False

    tree_flatten(batch, is_leaf=is_row_list)
    return found


def _kind(item: Any) -> Any:
    """What things of several rows have in common; None of what may be one of any."""
    if item is None or (isinstance(item, list) and not item):
        return None
    if isinstance(item, (Tensor, numpy.ndarray)):
        return type(item), item.dtype, item.ndim
    if isinstance(item, list):
        return list, _kind(item[0])
    return numbers.Number if isinstance(item, numbers.Number) else type(item)


def _counts_no_rows(leaf: Any) -> bool:
    """A name or an index beside results; a mean would be a float."""
    return leaf is None or isinstance(leaf, (str, bytes, numbers.Integral)) or (isinstance(leaf, list) and not leaf)


def _shown(part: Any) -> str:
    if isinstance(part, (Tensor, numpy.ndarray)):
        return f"a {type(part).__name__} of shape {list(part.shape)}"
    if isinstance(part, (list, tuple, Mapping)):
        return f"a {type(part).__name__} of length {len(part)}"
    return "nothing" if part is None else f"a {type(part).__name__}"
