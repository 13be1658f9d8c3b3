"""In which order the elements of a value stand in the value that it was made from.

Both are read row by row. An order is a list of digits, the outermost first: element ``i``, written with the digits'
sizes, stands at the sum of digit times stride. A transposed (2, 3) has the digits (3, stride 1), (2, stride 3). Orders
of views that follow one another compose, so that a chain of them can be proved to change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, fx

from lightning_autoparallel.fx import nodes as fxn

aten = torch.ops.aten

# Whatever they do with memory, elements keep their order.
_SAME_ORDER = {aten.clone.default, aten._unsafe_view.default}


class Digit(NamedTuple):
    """``size`` elements that are ``stride`` apart in the source."""

    size: int
    stride: int


@dataclass(frozen=True)
class ElementOrder:
    """A rearrangement of all elements of a source: every one appears once."""

    digits: tuple[Digit, ...]

    @classmethod
    def unchanged(cls, count: int) -> ElementOrder:
        """``count`` elements where they were."""
        return cls((Digit(count, 1),))

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(digit.size for digit in self.digits)

    @property
    def is_identity(self) -> bool:
        """Whether every element is where it was."""
        return _joined(self.digits) in ((), (Digit(self.count, 1),))

    def through(self, node: fx.Node) -> ElementOrder | None:
        """The order behind ``node``, whose one argument has this order.

        None if ``node`` is no view or copy, if it does not show every element once, or if no digits can tell the order.
        """
        (source,) = node.all_input_nodes
        if fxn.is_wait(node) or node.target in _SAME_ORDER:
            return self
        digits = _digits_of_view(node, source.meta["val"].shape)
        if digits is None:
            return None
        found = [self._at(digit) for digit in digits]
        return None if None in found else ElementOrder(tuple(digit for part in found for digit in part or ()))

    def _at(self, wanted: Digit) -> list[Digit] | None:
        """The digits that ``wanted`` walks through, if it fills each of them or an even part."""
        found: list[Digit] = []
        first, end = wanted.stride, wanted.stride * wanted.size
        place = 1
        for digit in reversed(self.digits):
            low, high, place_end = max(first, place), min(end, place * digit.size), place * digit.size
            if low < high:
                if low % place or high % low or place_end % high:
                    return None
                found.insert(0, Digit(high // low, digit.stride * (low // place)))
            place = place_end
        return found

    def stacked(self, times: int) -> ElementOrder:
        """``times`` such values one behind the other, their sources too: what an all-gather makes."""
        return ElementOrder((Digit(times, self.count), *self.digits))

    def rearranged(self, sizes: Sequence[int], order: Sequence[int]) -> ElementOrder:
        """The same elements from a source of shape ``sizes`` whose dims are permuted to ``order``.

        No digit may belong to two of these dims, as is so where each came from ``stacked``.
        """
        before = _row_major(sizes)
        permuted = _row_major([sizes[dim] for dim in order])
        after = {dim: permuted[place] for place, dim in enumerate(order)}
        digits = []
        for size, stride in self.digits:
            if size == 1:
                continue
            (dim,) = [i for i in range(len(sizes)) if before[i] <= stride < before[i] * sizes[i]]
            digits.append(Digit(size, stride // before[dim] * after[dim]))
        return ElementOrder(tuple(digits))

    def as_permutation(self) -> tuple[list[int], list[int]]:
        """The shape to view the source in, and its dims in the order that gives this one."""
        digits = _joined(self.digits)
        source = sorted(digits, key=lambda digit: -digit.stride)
        return [digit.size for digit in source], [source.index(digit) for digit in digits]


def is_copy(node: fx.Node) -> bool:
    """Whether the node writes its argument to other memory."""
    return node.target is aten.clone.default


def _digits_of_view(node: fx.Node, shape: Sequence[int]) -> tuple[Digit, ...] | None:
    """The view of a dense tensor of ``shape``, if by shape, stride and storage offset it shows each element once."""
    if node.op != "call_function" or node.target not in fxn.VIEWS:
        return None
    shown = node.target(torch.empty(tuple(shape), device="meta"), *node.args[1:], **node.kwargs)  # type: ignore[operator]
    if not isinstance(shown, Tensor) or shown.storage_offset() or not shown.numel() == math.prod(shape) > 0:
        return None
    digits = _joined([Digit(*pair) for pair in zip(shown.shape, shown.stride(), strict=True)])
    dense = 1
    for size, stride in sorted(digits, key=lambda digit: digit.stride):
        if stride != dense:
            return None
        dense *= size
    return digits


def _joined(digits: Sequence[Digit]) -> tuple[Digit, ...]:
    """As few digits as possible: neighbours that continue each other are one."""
    joined: list[Digit] = []
    for size, stride in digits:
        if joined and joined[-1].stride == size * stride:
            joined[-1] = Digit(joined[-1].size * size, stride)
        elif size != 1:
            joined.append(Digit(size, stride))
    return tuple(joined)


def _row_major(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
