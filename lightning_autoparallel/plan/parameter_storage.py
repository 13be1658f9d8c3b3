"""Where parameters lie between steps, and in which shards steps compute with them: the base plan and its rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch.distributed.tensor.placement_types import Placement, Replicate

from lightning_autoparallel.config import AUTO, STORED, PlanRule, PlanSpec
from lightning_autoparallel.contracts import Placements, PlanAxis
from lightning_autoparallel.errors import ConfigError, closest
from lightning_autoparallel.fx.placements import (
    dim_of,
    explicit,
    is_shard,
    nested_shards,
    parse_placement,
    placement_text,
    shard,
)
from lightning_autoparallel.torch_compat.sharding import StridedShard


@dataclass(frozen=True, kw_only=True)
class ParameterPlacement:
    """One parameter's ``storage`` between steps, and its placements while steps ``compute`` (whole over dp axes)."""

    storage: Placements
    compute: Placements


Shape = tuple[int, ...]


def place_parameters(
    spec: PlanSpec,
    shapes: Mapping[str, Shape],
    axes: Sequence[PlanAxis],
    warn: Callable[[str], None] = lambda message: None,
) -> dict[str, ParameterPlacement]:
    """Storage and compute placements of every parameter, by name.

    Rules say how steps compute with a parameter on other axes than dp_*; there it lies as it computes, unless a
    ``stored:`` rule cuts what is computed whole. On axes that no rule names it lies as the base plan has it. ``warn``
    is told of parameters that are to be cut but whose other cuts leave no even dim for it.

    Raises:
        ConfigError: a rule matches no parameter, names a dim that does not exist, or one that its axis does not divide.
    """
    for rule in spec.rules:
        if not rule.is_edge:
            check_matches(rule, shapes, "parameter")
    return {name: _place(spec, name, shape, axes, warn) for name, shape in shapes.items()}


def check_matches(rule: PlanRule, names: Mapping[str, object], noun: str) -> None:
    """Refuse a rule that matches nothing.

    Raises:
        ConfigError: with the name most like the rule's pattern.
    """
    if any(fnmatchcase(name, rule.pattern) for name in names):
        return
    # A pattern is most like the name that ends like it.
    tail = rule.pattern.rpartition("*")[2].strip(".")
    ends = {name: ".".join(name.split(".")[-len(tail.split(".")) :]) for name in names}
    near = closest(tail, ends.values(), cutoff=0)
    nearest = next((name for name, end in ends.items() if end == near), None)
    hint = f"; nearest: {nearest}" if nearest else ""
    raise ConfigError(f"rule '{rule.key}' matches no {noun}{hint}")


def rule_placement(
    rules: Sequence[PlanRule], name: str, shape: Sequence[int], axis: PlanAxis
) -> tuple[Placement, PlanRule] | None:
    """What the last rule that matches ``name`` and names ``axis`` says, or None.

    Raises:
        ConfigError: the dim does not exist, or does not divide by the axis (what is only stored may be padded).
    """
    for rule in reversed(rules):
        text = dict(rule.placements).get(axis.name)
        if text is None or not fnmatchcase(name, rule.pattern):
            continue
        try:
            placement = parse_placement(text, len(shape))
        except ValueError as error:
            raise ConfigError(f"rule '{rule.key}' gives '{name}' {error}: its shape is {list(shape)}") from error
        if rule.kind != STORED and is_shard(placement) and shape[dim_of(placement)] % axis.size:
            raise ConfigError(
                f"rule '{rule.key}' shares dim {dim_of(placement)} of '{name}', {shape[dim_of(placement)]} long, among "
                f"{axis.size} ranks of {axis.name}: that is not even; choose another dim or size, or 'R'"
            )
        return placement, rule
    return None


def _place(
    spec: PlanSpec, name: str, shape: Shape, axes: Sequence[PlanAxis], warn: Callable[[str], None]
) -> ParameterPlacement:
    named = [rule_placement(_of_kind(spec, "parameter"), name, shape, axis) for axis in axes]
    placements: list[Placement] = [Replicate() if found is None else found[0] for found in named]
    order = next((found[1].order for found in named if found is not None), ())
    computed = [position for position, placement in enumerate(placements) if is_shard(placement)]
    # What steps compute with is cut first, unless rules say otherwise: a gather then gives it in one piece.
    order = (*order, *(axes[i].mesh_axes[-1] for i in computed if axes[i].mesh_axes[-1] not in order))
    for position, dim in _stored_dims(spec, name, shape, axes, placements).items():
        placements = _with_shard(placements, position, dim, shape, axes, order, name, warn)
    cuts = explicit(tuple(placements), axes)
    whole: list[Placement] = [Replicate()] * len(axes)
    compute = tuple(cuts[i] if i in computed else whole[i] for i in range(len(axes)))
    return ParameterPlacement(storage=tuple(placements), compute=compute)


def _of_kind(spec: PlanSpec, kind: str) -> list[PlanRule]:
    return [rule for rule in spec.rules if rule.kind == kind]


def _stored_dims(
    spec: PlanSpec, name: str, shape: Shape, axes: Sequence[PlanAxis], computed: Sequence[Placement]
) -> dict[int, int]:
    """The positions of axes that cut what is computed whole, between steps, and the dim that each would cut.

    Raises:
        ConfigError: a ``stored:`` rule contradicts what the parameter computes as.
    """
    found: dict[int, int] = {}
    base, rules = _sharded_positions(spec.base, axes), _of_kind(spec, STORED)
    for position, axis in enumerate(axes if shape else ()):
        said = rule_placement(rules, name, shape, axis)
        if said is not None and is_shard(computed[position]) and said[0] != computed[position]:
            raise ConfigError(
                f"rule '{said[1].key}' has '{name}' lie as {placement_text(said[0])} on {axis.name}, but another rule "
                f"has steps compute with {placement_text(computed[position])} of it there: leave one of them out"
            )
        is_cut = is_shard(said[0]) if said is not None else position in base
        if is_cut and not is_shard(computed[position]):
            found[position] = dim_of(said[0]) if said is not None else 0
    return found


def _sharded_positions(base: str, axes: Sequence[PlanAxis]) -> list[int]:
    """The axes over which the base plan shards parameters."""
    if base == "ddp":
        return []
    return [
        i
        for i, axis in enumerate(axes)
        if axis.shards_batch and (base in ("fsdp", AUTO) or "dp_shard" in axis.mesh_axes)
    ]


def _with_shard(
    placements: list[Placement],
    position: int,
    dim: int,
    shape: Shape,
    axes: Sequence[PlanAxis],
    order: Sequence[str],
    name: str,
    warn: Callable[[str], None],
) -> list[Placement]:
    """A shard on axis ``position``: of ``dim``, inside or around the cuts that are there, or of another one."""
    size = axes[position].size
    cutting = [i for i, placement in enumerate(placements) if is_shard(placement) and dim_of(placement) == dim]
    if not cutting:
        return [shard(dim) if i == position else placement for i, placement in enumerate(placements)]
    nested = nested_shards(dim, _cut_first([*cutting, position], axes, order), axes)
    is_even = shape[dim] % (size * math.prod(axes[i].size for i in cutting)) == 0
    # DTensor cannot gather what two axes of three cut in blocks of one dim.
    if is_even and sum(isinstance(cut, StridedShard) for cut in nested) < 2:
        return [cut if is_shard(cut) else placement for cut, placement in zip(nested, placements, strict=True)]
    cut_dims = {dim_of(placement) for placement in placements if is_shard(placement)}
    even = next((other for other in range(len(shape)) if other not in cut_dims and shape[other] % size == 0), None)
    if even is None:
        warn(
            f"parameter '{name}' of shape {list(shape)} stays whole over {axes[position].name}: its rules leave no dim "
            f"that divides by {size}"
        )
        return placements
    return [shard(even) if i == position else placement for i, placement in enumerate(placements)]


def _cut_first(positions: list[int], axes: Sequence[PlanAxis], order: Sequence[str]) -> list[int]:
    """``positions`` as ``order`` wants them; axes that it does not name come after, in the order given."""
    places = {name: place for place, name in enumerate(order)}
    return sorted(positions, key=lambda i: places.get(axes[i].mesh_axes[-1], len(places)))
