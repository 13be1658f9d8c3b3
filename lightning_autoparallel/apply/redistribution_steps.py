"""Which collectives turn one placement into another: as few as can be without moving more of the tensor than needed.

What makes the tensor smaller comes first: slices, reduce-scatters, all-to-alls; then all-reduces, then gathers.
Explicit placements (``fx.placements``) of different axes change independently of each other, so all axes that need the
same kind of collective take it together, whatever lies between them and whichever dims they cut. Not together:

- all-to-alls: each has another set of ranks to send to, and other pieces;
- maxima and minima, and any mix of partial values but sums with averages: they are reduced one by one, the innermost
  first, as the placements are nested.

Shards of an uneven dim are padded to one size, and the padding is cut off after a gather. Several axes cut it into
DTensor's nested chunks (5 rows over 2 x 2 are 2, 1, 1, 1), of which a flattened collective alone would join the wrong
rows (in torch 2.13 it does): ``apply.nested`` puts them in order. What an inner axis has there depends on the axes
further out, so that a gather over one of those takes the inner ones with it, to be cut anew. Blocks must divide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from lightning_autoparallel.apply.group_choice import Groups, rank_order
from lightning_autoparallel.contracts import Placements, PlanAxis
from lightning_autoparallel.fx.placements import can_be, can_become, cut_order, dim_of, divides, is_shard
from lightning_autoparallel.torch_compat.sharding import split_factor_of

StepKind = Literal["slice", "reduce_scatter", "all_to_all", "all_reduce", "all_gather", "spread"]
COLLECTIVES = ("reduce_scatter", "all_to_all", "all_reduce", "all_gather")
_LINEAR = ("sum", "avg")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One collective, or one local operation, and the explicit placements before and after it.

    ``positions`` are the axes that change, in the order in which the group of ``axis`` counts its ranks.
    """

    kind: StepKind
    positions: tuple[int, ...]
    axis: PlanAxis
    before: Placements
    after: Placements


def plan_steps(shape: Sequence[int], source: Placements, target: Placements, groups: Groups) -> list[Step]:
    """The steps from ``source`` to ``target``, both explicit, of a tensor of global ``shape``.

    Shards of dims that axes further out cut otherwise before and after may also be gathered (or reduced) together and
    cut anew. That moves more bytes, and is done where it takes fewer collectives.
    """
    for placements in (source, target):
        assert can_be(placements, groups.axes, shape), f"{placements} does not divide {list(shape)} into blocks"
    direct = _steps(shape, source, target, groups)
    if _collectives(direct) < 2:
        return direct
    between = _whole_where_outer_cuts_change(source, target)
    if not can_be(between, groups.axes, shape):
        return direct
    detour = _steps(shape, source, between, groups) + _steps(shape, between, target, groups)
    return detour if _collectives(detour) < _collectives(direct) else direct


def _steps(shape: Sequence[int], source: Placements, target: Placements, groups: Groups) -> list[Step]:
    steps: list[Step] = []
    current = source
    while current != target:
        step = _Next(shape, current, target, groups).step()
        assert step is not None, f"no collective turns {current} into {target}"
        steps.append(step)
        current = step.after
    return steps


def _collectives(steps: Sequence[Step]) -> int:
    return sum(step.kind in COLLECTIVES for step in steps)


def _whole_where_outer_cuts_change(source: Placements, target: Placements) -> Placements:
    """``target`` without the shards of dims that axes further out cut otherwise in ``source``."""
    between = list(target)
    for i, placement in enumerate(target):
        if is_shard(placement):
            now, then = (_axes_that_cut(side[:i], dim_of(placement)) for side in (source, target))
            between[i] = placement if now == then else Replicate()
    return tuple(between)


def _axes_that_cut(placements: Placements, dim: int) -> set[int]:
    return {i for i, placement in enumerate(placements) if is_shard(placement) and dim_of(placement) == dim}


class _Next:
    """The next step of a value that is at ``current``."""

    def __init__(self, shape: Sequence[int], current: Placements, target: Placements, groups: Groups) -> None:
        self._shape, self._current, self._target, self._groups = shape, current, target, groups
        self._pending = [i for i in range(len(current)) if current[i] != target[i]]
        self._partial = movable_partials(current)

    def step(self) -> Step | None:
        """None if nothing leads to the target."""
        ways: list[Callable[[], Step | None]] = [
            self._slice,
            self._reduce_scatter,
            self._all_to_all,
            self._all_reduce,
            self._all_gather,
            self._spread,
        ]
        return next((step for step in (way() for way in ways) if step is not None), None)

    def _slice(self) -> Step | None:
        for i in self._pending:
            if isinstance(self._current[i], Replicate) and self._fits([i]):
                return self._make("slice", [i], self._groups.axes[i], [self._target[i]])
        return None

    def _reduce_scatter(self) -> Step | None:
        chosen: list[int] = []
        for i in sorted(self._pending, key=self._cut_of_target):
            if i in self._partial and (not chosen or self._is_linear(i)) and self._fits([*chosen, i]):
                chosen.append(i)
        return self._together("reduce_scatter", chosen, self._target)

    def _all_to_all(self) -> Step | None:
        for i in self._pending:
            if is_shard(self._current[i]) and self._fits([i]) and not self._is_recut(i):
                return self._make("all_to_all", [i], self._groups.axes[i], [self._target[i]])
        return None

    def _all_reduce(self) -> Step | None:
        """A partial value whose shard has no room yet is reduced as well: what is in the way must be gathered first.

        Reducing before that is cheaper than scattering the larger tensor after it.
        """
        wanted = [i for i in self._pending if i in self._partial and not self._can_spread(i)]
        if wanted and not self._is_linear(wanted[-1]):
            wanted = wanted[-1:]
        return self._together("all_reduce", wanted)

    def _all_gather(self) -> Step | None:
        cut = [i for i in self._pending if is_shard(self._current[i])]
        whole = [i for i in cut if not is_shard(self._target[i]) or self._is_recut(i)]
        # Only axes that could not exchange their dims are left: one of them makes room for the others.
        return self._together("all_gather", self._with_inner_cuts(whole or cut[-1:]), self._current)

    def _with_inner_cuts(self, positions: Sequence[int]) -> list[int]:
        """``positions`` and the axes that cut the same uneven dims after them."""
        found = set(positions)
        for dim in {dim_of(self._current[i]) for i in positions}:
            order = cut_order(self._current, dim)
            if not divides(order, self._current, self._groups.axes, self._shape[dim]):
                found |= set(order[min(order.index(i) for i in order if i in positions) :])
        return sorted(found)

    def _spread(self) -> Step | None:
        """From one kind of partial value to another: each rank scales its own."""
        for i in self._pending:
            if self._can_spread(i):
                return self._make("spread", [i], self._groups.axes[i], [self._target[i]])
        return None

    def _can_spread(self, position: int) -> bool:
        if not isinstance(self._target[position], Partial):
            return False
        if isinstance(self._current[position], Replicate):
            return True
        return self._is_linear(position) and _reduce_op(self._target[position]) in _LINEAR

    def _together(self, kind: StepKind, chosen: Sequence[int], cuts: Placements = ()) -> Step | None:
        """One collective over all of ``chosen`` where a group joins them, else over one of them.

        ``cuts`` are the placements at the side where the tensor is cut. The cut that is made last is undone first.
        """
        if not chosen:
            return None
        goal = self._target if kind == "reduce_scatter" else (Replicate(),) * len(self._current)
        order, exact = rank_order(chosen, cuts, self._groups.axes, self._shape)
        joined = self._groups.join(order, exact)
        if joined is None:
            ways = order[::-1] if kind == "all_gather" else order
            single = next(i for i in ways if self._can_change({i: goal[i]}))
            joined = (single,), self._groups.axes[single]
        positions, axis = joined
        return self._make(kind, positions, axis, [goal[i] for i in positions])

    def _make(self, kind: StepKind, positions: Sequence[int], axis: PlanAxis, goal: Sequence[Placement]) -> Step:
        after = _changed(self._current, dict(zip(positions, goal, strict=True)))
        return Step(kind=kind, positions=tuple(positions), axis=axis, before=self._current, after=after)

    def _fits(self, positions: Iterable[int]) -> bool:
        """Whether the axes at ``positions`` may take their target shards now."""
        changes = {i: self._target[i] for i in positions}
        if not all(is_shard(placement) for placement in changes.values()):
            return False
        return self._can_change(changes)

    def _can_change(self, changes: dict[int, Placement]) -> bool:
        return can_become(self._current, _changed(self._current, changes), self._groups.axes, self._shape)

    def _cut_of_target(self, position: int) -> int:
        placement = self._target[position]
        return split_factor_of(placement) if is_shard(placement) else 0

    def _is_recut(self, position: int) -> bool:
        """Whether a shard becomes another interleaving of the same dim: it is gathered and cut anew."""
        source, target = self._current[position], self._target[position]
        return is_shard(source) and is_shard(target) and dim_of(source) == dim_of(target)

    def _is_linear(self, position: int) -> bool:
        return _reduce_op(self._current[position]) in _LINEAR


def movable_partials(placements: Placements) -> set[int]:
    """The axes whose partial values may be reduced now: all that are of one kind with the innermost one."""
    found: set[int] = set()
    kind = None
    for i in reversed(range(len(placements))):
        if not isinstance(placements[i], Partial):
            continue
        op = "linear" if _reduce_op(placements[i]) in _LINEAR else _reduce_op(placements[i])
        if kind not in (None, op):
            break
        kind = op
        found.add(i)
    return found


def _reduce_op(placement: Placement) -> str | None:
    return str(placement.reduce_op) if isinstance(placement, Partial) else None


def _changed(placements: Placements, changes: dict[int, Placement]) -> Placements:
    return tuple(changes.get(i, placement) for i, placement in enumerate(placements))
