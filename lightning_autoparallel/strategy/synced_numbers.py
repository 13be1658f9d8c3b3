"""Numbers of Python that a captured step logs with ``sync_dist=True``.

What such a step logs of its tensors is of the whole batch. A number is each rank's own: where all have the same, it is
that of one device; where they differ, they are reduced as DDP reduces them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from torch import Tensor, nn

from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.pipeline import ControlGroup
from lightning_autoparallel.torch_compat.tree import tree_map

Number = int | float


@dataclass(frozen=True)
class LoggedNumber:
    """Stands for the n-th number that a step logs with ``sync_dist=True``; ``value`` as the step gave it."""

    index: int
    value: Any
    reduction: str


class LoggedNumbers:
    """Those of one run of a step, in the order in which it logs them."""

    def __init__(self, mesh: ParallelMesh, control: ControlGroup) -> None:
        self._mesh, self._control = mesh, control
        self._noted: list[LoggedNumber] = []

    def forget(self) -> None:
        """Begin with another run of the step."""
        self._noted = []

    def noted(self, values: Any, log: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``log(*args, **kwargs)`` logs, with stand-ins for the numbers that it joins over all ranks."""
        given = inspect.signature(log).bind(*args, **kwargs).arguments
        if not given.get("sync_dist") or given.get("rank_zero_only") or given.get("sync_dist_group") is not None:
            return values
        reduction = given.get("reduce_fx", "mean")
        name = (reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")).lower()
        return tree_map(lambda leaf: self._note(leaf, name), values)

    def _note(self, leaf: Any, reduction: str) -> Any:
        if isinstance(leaf, (Tensor, nn.Module, str)):
            return leaf
        self._noted.append(LoggedNumber(len(self._noted), leaf, reduction))
        return self._noted[-1]

    def joined(self, resolve: Callable[[Any], Any]) -> list[Any]:
        """The numbers of a real step, of which ``resolve`` gives this rank's; one small gather where there are any."""
        mine = [resolve(number.value) for number in self._noted]
        if not any(isinstance(value, Number) for value in mine):
            return mine
        by_rank = self._control.gather(mine)
        return [self._join([values[n.index] for values in by_rank], n.reduction) for n in self._noted]

    def _join(self, values: Sequence[Any], reduction: str) -> Any:
        if all(value == values[0] or (value != value and values[0] != values[0]) for value in values):
            return values[0]
        if reduction == "sum":  # ranks that have the same rows count once
            return fmean(values) * self._mesh.data_parallel_size
        return {"min": min, "max": max}.get(reduction, fmean)(values)
