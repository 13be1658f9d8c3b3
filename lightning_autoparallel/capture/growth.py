"""How what a step computes grows with its rows: were every row there twice, a mean would stay and a sum would double.

A step is run twice under ``Recording``, on fake tensors of its rows and of twice as many; ``growths`` compares the two
runs call by call. A value of growth d is 2^d times as large: 0 means it does not depend on how many rows there are,
1 is a sum or a count over rows, -1 what was divided by such a count.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_autoparallel.capture.growth_rules import ZERO, Growth, growth_of_call, growth_of_number, highest, is_view
from lightning_autoparallel.torch_compat.dispatch import OpOverload, TorchDispatchMode, written
from lightning_autoparallel.torch_compat.tree import tree_leaves

UNKNOWN: Growth = None


@dataclass(frozen=True)
class Call:
    """One call of an operator: the tensors of ``args`` are kept alive, so that identities tell them apart."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class Recording(TorchDispatchMode):
    """Notes the calls of operators of one run.

    What only asks a tensor where it is computes nothing: a run asks where it reads something for the first time.
    """

    supports_higher_order_operators = True  # noted as an operator of which nothing is known

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (isinstance(func, OpOverload) and func.namespace == "prim"):  # device, layout
            self.calls.append(Call(func, tuple(args), dict(kwargs or {}), result))
        return result


def growths(
    once: Sequence[Call], twice: Sequence[Call], values: Sequence[tuple[Any, Any]], kept: Collection[int] = ()
) -> tuple[Growth, ...]:
    """Of each pair of ``values``, as the one run and the other give it; ``UNKNOWN`` where calls do not tell.

    What no call made (parameters, buffers, the batch) is of growth 0. Tensors that are ``kept`` from step to step, by
    identity, have what earlier steps have added to them, so that they grow like whatever is added.
    """
    if [call.operator for call in once] != [call.operator for call in twice]:
        return (UNKNOWN,) * len(values)
    known = _Known(kept)
    for one, other in zip(once, twice, strict=True):
        known.add(one, other)
    return tuple(known.of(value, grown) for value, grown in values)


class _Known:
    """Growths by tensor; a view has that of what it is a view of."""

    def __init__(self, kept: Collection[int]) -> None:
        self._growths: dict[int, Growth] = dict.fromkeys(kept, ZERO)
        self._roots: dict[int, int] = {}

    def of(self, one: Any, other: Any) -> Growth:
        return self._growths.get(self._root(one), 0.0) if isinstance(one, Tensor) else growth_of_number(one, other)

    def _root(self, tensor: Tensor) -> int:
        return self._roots.get(id(tensor), id(tensor))

    def add(self, one: Call, other: Call) -> None:
        is_known = isinstance(one.operator, OpOverload)
        changed = [id(tensor) for tensor in written(one.operator, one.args, one.kwargs)] if is_known else []
        for result, twice in zip(tree_leaves(one.result), tree_leaves(other.result), strict=False):
            if not isinstance(result, Tensor):
                continue
            if id(result) not in changed and is_view(one.operator):
                self._roots[id(result)] = self._root(one.args[0])
                continue
            growth = growth_of_call(one, other, (result, twice), self.of)
            if id(result) in changed:
                self._write(result, growth)
            else:
                self._growths[id(result)] = growth

    def _write(self, tensor: Tensor, growth: Growth) -> None:
        """Of a part that is written the rest stays."""
        root = self._root(tensor)
        if root != id(tensor):
            growth = highest([self._growths.get(root, 0.0), growth])
        self._growths[root] = growth
