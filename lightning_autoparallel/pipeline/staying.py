"""Parameters that a found plan must leave where they are: what is kept of them, or their memory, could not follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from glob import escape
from typing import TYPE_CHECKING

from lightning_autoparallel.apply.params import ParameterLayout
from lightning_autoparallel.config import STORED, PlanRule
from lightning_autoparallel.contracts import ShardingPlan
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.fx.placements import rule_text
from lightning_autoparallel.plan.parameter_storage import rule_placement

if TYPE_CHECKING:
    from lightning_autoparallel.pipeline.stages import StageContext

_SHOWN = 5  # names in a note


def staying(
    context: StageContext,
    followers: Mapping[str, tuple[str, ...] | None],
    layouts: Mapping[str, ParameterLayout],
) -> tuple[PlanRule, ...]:
    """Rules that leave what cannot follow where it lies, on whichever rank it is; every rank calls it."""
    told = context.control.gather(followers)
    names = {name for of_rank in told for name in of_rank}
    everywhere = {name for name in names if len(said := {of_rank.get(name) for of_rank in told}) > 1 or None in said}
    pins: list[PlanRule] = []
    for name in (name for name in layouts if name in everywhere):
        pins += left_where_it_is(name, layouts[name], context)
    return tuple(pins)


def left_where_it_is(name: str, layout: ParameterLayout, context: StageContext) -> list[PlanRule]:
    """Rules that have one parameter lie as it does."""
    lies = zip(layout.axes, layout.placements, strict=True)
    texts = tuple((one, rule_text(placement)) for axis, placement in lies for one in axis.mesh_axes)
    pins = [PlanRule(key=f"{STORED}:{name}", kind=STORED, pattern=escape(name), placements=texts)]
    # What computes with a part of it would have it cut in another order.
    rules = [rule for rule in context.config.plan.rules if rule.kind == "parameter"]
    free = [axis for axis in layout.axes if rule_placement(rules, name, layout.shape, axis) is None]
    whole = tuple((one, "R") for axis in free for one in axis.mesh_axes if not axis.shards_batch)
    if whole:
        pins.append(PlanRule(key=name, kind="parameter", pattern=escape(name), placements=whole))
    return pins


def told_of_staying(pins: Sequence[PlanRule]) -> tuple[str, ...]:
    """What is to be said of parameters that stay."""
    if not pins:
        return ()
    names = [rule.key.removeprefix(f"{STORED}:") for rule in pins if rule.kind == STORED]
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return (
        f"plan auto: {shown} stay where they were before the first step: something holds their memory (as p.data that "
        "was taken), an optimizer's state of another shape could not follow, or not all ranks have a gradient of them",
    )


def check_staying(plan: ShardingPlan, pins: Sequence[PlanRule], layouts: Mapping[str, ParameterLayout]) -> None:
    """Whether a plan leaves them there.

    Raises:
        ConfigError: it does not.
    """
    for rule in pins:
        name = rule.key.removeprefix(f"{STORED}:")
        if rule.kind == STORED and name in plan.parameters and plan.parameters[name] != layouts[name].placements:
            raise ConfigError(
                f"plan auto would move {name} from {layouts[name].placements} to {plan.parameters[name]}, but "
                "something holds its memory (as p.data that was taken before the first step) and could not follow, or "
                "not all ranks have a gradient of it: let go of it, or name a plan"
            )
