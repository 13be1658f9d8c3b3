"""Meshes of several axes without processes, redistributions on them as graphs, and what all ranks hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Partial, Replicate

from lightning_autoparallel.apply.emit import GraphEmitter
from lightning_autoparallel.apply.group_choice import OrderedAxis
from lightning_autoparallel.apply.redistribute import redistribute
from lightning_autoparallel.contracts import Placements, PlanAxis
from lightning_autoparallel.fx.placements import explicit, local_shape
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode
from tests.support.placements import AVG, P, R, S, cut, joined

Pair = tuple[Placements, Placements]
TABLE = [R, S(0), S(1), P, AVG]
INNER_FIRST = (S(0, 2), S(0))  # the inner axis cuts first, as FSDP over tensor parallelism


def axes_of(rank: int, *sizes: int) -> list[PlanAxis]:
    """The axes as ``rank`` sees them, the last one innermost; group ``k`` is axis ``k``'s."""
    axes = []
    for k, size in reversed(list(enumerate(sizes))):
        axes.append(PlanAxis(mesh_axes=(f"axis{k}",), size=size, rank=rank % size, group_name=str(k)))
        rank //= size
    return axes[::-1]


def joint_axis(rank: int, sizes: Sequence[int], chosen: Sequence[int]) -> PlanAxis:
    """The axes ``chosen`` as one whose ranks count in their order; group ``"0,2"`` joins axes 0 and 2."""
    axes = axes_of(rank, *sizes)
    place = 0
    for k in chosen:
        place = place * sizes[k] + axes[k].rank
    return PlanAxis(
        mesh_axes=tuple(f"axis{k}" for k in chosen),
        size=math.prod(sizes[k] for k in chosen),
        rank=place,
        group_name=",".join(map(str, chosen)),
    )


def joint_axes_of(rank: int, *sizes: int) -> list[PlanAxis]:
    """All ascending subsets of two or more axes as one."""
    counts = range(2, len(sizes) + 1)
    return [joint_axis(rank, sizes, chosen) for n in counts for chosen in itertools.combinations(range(len(sizes)), n)]


def ordered_by(rank: int, *sizes: int) -> OrderedAxis:
    """Makes a group in any order of axes."""
    return lambda axes: joint_axis(rank, sizes, [int(axis.group_name) for axis in axes])


def groups_of(*sizes: int) -> dict[str, list[list[int]]]:
    """The ranks of every group over these axes, in every order."""
    ranks = range(math.prod(sizes))
    groups: dict[str, list[list[int]]] = {}
    for count in range(1, len(sizes) + 1):
        for chosen in itertools.permutations(range(len(sizes)), count):
            by_rest: dict[tuple[int, ...], list[int]] = {}
            # Ranks in the order in which the group counts them.
            for rank in sorted(ranks, key=lambda rank: [axes_of(rank, *sizes)[k].rank for k in chosen]):
                rest = tuple(axis.rank for k, axis in enumerate(axes_of(rank, *sizes)) if k not in chosen)
                by_rest.setdefault(rest, []).append(rank)
            groups[",".join(map(str, chosen))] = list(by_rest.values())
    return groups


def pairs_over(axes: int) -> list[Pair]:
    """All pairs of placements of the table."""
    sides = list(itertools.product(TABLE, repeat=axes))
    return list(itertools.product(sides, sides))


def graph_of_all(
    pairs: Sequence[Pair],
    shape: Sequence[int],
    axes: Sequence[PlanAxis],
    joint: Sequence[PlanAxis] = (),
    ordered: OrderedAxis | None = None,
    dtype: torch.dtype = torch.float64,
) -> fx.Graph:
    """One input per distinct source, in the order of their first appearance; one output per pair."""
    mode = FakeTensorMode()
    emitter = GraphEmitter(mode)
    inputs: dict[Placements, fx.Node] = {}
    for source in sources_of(pairs):
        with mode:
            local = torch.empty(local_shape(shape, source, axes), dtype=dtype)
        inputs[source] = emitter.placeholder(f"x{len(inputs)}", local)
    emitter.graph.output(
        [redistribute(emitter, inputs[source], shape, source, target, axes, joint, ordered) for source, target in pairs]
    )
    emitter.graph.lint()
    return emitter.graph


def sources_of(pairs: Sequence[Pair]) -> list[Placements]:
    """The distinct sources, in the order of their first appearance."""
    return list(dict.fromkeys(source for source, _ in pairs))


def parts_of_all(full: Tensor, placements: Placements, sizes: Sequence[int]) -> list[Tensor]:
    """The parts of all ranks, the last axis fastest; what is replicated over an axis has the same addends there."""
    if not placements:
        return [full]
    torch.manual_seed(0)
    parts = []
    for outer in cut(full, placements[0], sizes[0]):
        parts += parts_of_all(outer, placements[1:], sizes[1:])
    return parts


def joined_from_all(parts: list[Tensor], target: Placements, shape: torch.Size, sizes: Sequence[int]) -> Tensor:
    """The full tensor that the parts of all ranks make."""
    if not target:
        return parts[0]
    inside = torch.Size(local_shape(shape, target[:1], axes_of(0, *sizes[:1])))
    count = len(parts) // sizes[0]
    groups = [parts[i * count : (i + 1) * count] for i in range(sizes[0])]
    outer = [joined_from_all(group, target[1:], inside, sizes[1:]) for group in groups]
    return joined(outer, target[0], shape)


Join = Callable[[list[Tensor], Placements, torch.Size, Sequence[int]], Tensor]


def check_all(
    pairs: Sequence[Pair],
    outputs: Sequence[Sequence[Tensor]],
    full: Tensor,
    sizes: Sequence[int],
    join: Join = joined_from_all,
) -> None:
    """``outputs`` of every rank make the full tensor, pair by pair, exactly where nothing was reduced."""
    for (source, target), parts in zip(pairs, zip(*outputs, strict=True), strict=True):
        pair = f"{source} -> {target}"
        made = join(list(parts), target, full.shape, sizes)
        if any(isinstance(placement, Partial) for placement in (*source, *target)):
            torch.testing.assert_close(made, full, msg=lambda text, pair=pair: f"{pair}: {text}")
        else:
            assert torch.equal(made, full), pair
        shapes = {part.shape for part in parts}
        assert shapes == {torch.Size(local_shape(full.shape, target, axes_of(0, *sizes)))}, pair


def is_local(pair: Pair, axes: Sequence[PlanAxis]) -> bool:
    """Whether nothing but replicated values change, so that nothing needs to be sent."""
    source, target = (explicit(side, axes) for side in pair)
    return all(a == b or isinstance(a, Replicate) for a, b in zip(source, target, strict=True))
