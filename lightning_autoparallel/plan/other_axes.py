"""What the axes planned before mean for the next one: dims that are taken, tensors that are smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Placement

from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.fx.placements import dim_of, fit_together, is_shard
from lightning_autoparallel.plan.axis import Producer
from lightning_autoparallel.plan.candidates import Candidate
from lightning_autoparallel.torch_compat.sharding import split_factor_of


class OtherAxes:
    """The choices on axes that are planned already."""

    def __init__(self) -> None:
        self._solved: list[tuple[PlanAxis, Mapping[fx.Node, Candidate]]] = []

    def add(self, axis: PlanAxis, choices: Mapping[fx.Node, Candidate]) -> None:
        """The next axes are planned into these choices."""
        self._solved.append((axis, choices))

    def fit(self, axis: PlanAxis) -> Callable[[fx.Node, Candidate], bool]:
        """Whether a candidate on ``axis`` goes together with the choices of the others.

        An axis never cuts a dim that another one shards plainly, as the batch: it may share out what is inside of it.
        Equal calls have the same candidates, so that each is asked of once for all blocks.
        """
        known: dict[tuple[int, ...], tuple[tuple[Candidate, ...], bool]] = {}  # with what the ids are of

        def fits(node: fx.Node, candidate: Candidate) -> bool:
            together = (candidate, *(choices[node] for _, choices in self._solved))
            key = tuple(map(id, together))
            if key not in known:
                known[key] = together, self._fit_together(node, axis, candidate)
            return known[key][1]

        return fits

    def _fit_together(self, node: fx.Node, axis: PlanAxis, candidate: Candidate) -> bool:
        return all(
            _compatible(placement, axis, taken, other, tensor)
            for other, choices in self._solved
            for placement, taken, tensor in _slots(node, candidate, choices[node])
        )

    def cuts(self, node: fx.Node) -> tuple[int, ...]:
        """Into how many parts each output of a call, then each tensor argument is cut; empty without other axes."""
        counts: tuple[int, ...] = ()
        for axis, choices in self._solved:
            placements = (*choices[node].outputs, *choices[node].inputs)
            mine = tuple(axis.size if is_shard(placement) else 1 for placement in placements)
            counts = tuple(a * b for a, b in zip(counts, mine, strict=True)) if counts else mine
        return counts

    def size_bytes(self, producer: Producer) -> int:
        """Bytes of a value that the other axes have cut."""
        node, index = producer
        value = fxn.values(node)[index]
        assert value is not None
        size = fxn.size_bytes(value)
        for axis, choices in self._solved:
            if is_shard(choices[node].outputs[index]):
                size //= axis.size
        return size


def _slots(
    node: fx.Node, candidate: Candidate, other: Candidate
) -> Iterator[tuple[Placement | None, Placement | None, Tensor | None]]:
    yield from zip(candidate.outputs, other.outputs, fxn.values(node), strict=True)
    values = [argument.meta["val"] for argument in fxn.tensor_arguments(node)]
    yield from zip(candidate.inputs, other.inputs, values, strict=True)


def _compatible(
    mine: Placement | None, axis: PlanAxis, theirs: Placement | None, other: PlanAxis, tensor: Tensor | None
) -> bool:
    if mine is None or theirs is None or tensor is None or not (is_shard(mine) and is_shard(theirs)):
        return True
    if dim_of(mine) != dim_of(theirs):
        return True
    if split_factor_of(mine) == split_factor_of(theirs):
        return False
    return fit_together((mine, theirs), (axis, other), tensor.shape)
