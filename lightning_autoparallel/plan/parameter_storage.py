"""Where parameters lie between steps, and in which shards steps compute with them: the base plan and its rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch.distributed.tensor.placement_types import Placement, Replicate

from lightning_autoparallel.config import AUTO, PlanRule, PlanSpec
from lightning_autoparallel.contracts import Placements, PlanAxis
from lightning_autoparallel.errors import ConfigError, closest
from lightning_autoparallel.fx.placements import dim_of, explicit, is_shard, nested_shards, parse_placement, shard


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

    ``warn`` is told of parameters that the base plan would shard but whose rules leave no even dim for it.

    Raises:
        ConfigError: a rule matches no parameter, names a dim that does not exist, or one that its axis does not divide.
    """
    rules = [rule for rule in spec.rules if rule.kind == "parameter"]
    for rule in rules:
        check_matches(rule, shapes, "parameter")
    return {name: _place(spec, rules, name, shape, axes, warn) for name, shape in shapes.items()}


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
        ConfigError: the dim does not exist, or does not divide by the axis.
    """
    for rule in reversed(rules):
        text = dict(rule.placements).get(axis.name)
        if text is None or not fnmatchcase(name, rule.pattern):
            continue
        try:
            placement = parse_placement(text, len(shape))
        except ValueError as error:
            raise ConfigError(f"rule '{rule.key}' gives '{name}' {error}: its shape is {list(shape)}") from error
        if is_shard(placement) and shape[dim_of(placement)] % axis.size:
            raise ConfigError(
                f"rule '{rule.key}' shares dim {dim_of(placement)} of '{name}', {shape[dim_of(placement)]} long, among "
                f"{axis.size} ranks of {axis.name}: that is not even; choose another dim or size, or 'R'"
            )
        return placement, rule
    return None


def _place(
    spec: PlanSpec,
    rules: Sequence[PlanRule],
    name: str,
    shape: Shape,
    axes: Sequence[PlanAxis],
    warn: Callable[[str], None],
) -> ParameterPlacement:
    named = [rule_placement(rules, name, shape, axis) for axis in axes]
    placements: list[Placement] = [Replicate() if found is None else found[0] for found in named]
    order = next((found[1].order for found in named if found is not None), ())
    for position in _sharded_positions(spec.base, axes):
        if shape:
            placements = _with_base_shard(placements, position, shape, axes, order, name, warn)
    cuts = explicit(tuple(placements), axes)
    compute = tuple(Replicate() if axis.shards_batch else cut for cut, axis in zip(cuts, axes, strict=True))
    return ParameterPlacement(storage=tuple(placements), compute=compute)


def _sharded_positions(base: str, axes: Sequence[PlanAxis]) -> list[int]:
    """The axes over which the base plan shards parameters."""
    if base == "ddp":
        return []
    return [
        i
        for i, axis in enumerate(axes)
        if axis.shards_batch and (base in ("fsdp", AUTO) or "dp_shard" in axis.mesh_axes)
    ]


def _with_base_shard(
    placements: list[Placement],
    position: int,
    shape: Shape,
    axes: Sequence[PlanAxis],
    order: Sequence[str],
    name: str,
    warn: Callable[[str], None],
) -> list[Placement]:
    """The base plan's shard on axis ``position``: of dim 0, inside or around the cut that a rule makes there."""
    size = axes[position].size
    cutting = [i for i, placement in enumerate(placements) if is_shard(placement) and dim_of(placement) == 0]
    if not cutting:
        return [shard(0) if i == position else placement for i, placement in enumerate(placements)]
    if shape[0] % (size * math.prod(axes[i].size for i in cutting)) == 0:
        nested = nested_shards(0, _cut_first([*cutting, position], axes, order), axes)
        return [cut if is_shard(cut) else placement for cut, placement in zip(nested, placements, strict=True)]
    free = [dim for dim in range(1, len(shape)) if not any(is_shard(p) and dim_of(p) == dim for p in placements)]
    even = next((dim for dim in free if shape[dim] % size == 0), None)
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
