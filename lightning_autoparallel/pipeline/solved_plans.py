"""What the solver finds for a step: the best plans where the backward gathers parameters again, and where they stay."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from lightning_autoparallel.config import AUTO, PlanSpec
from lightning_autoparallel.contracts import CapturedGraph
from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.errors import InfeasiblePlanError
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.pipeline.fastest_plan import KEEPING, Answer
from lightning_autoparallel.pipeline.staying import told_of_staying
from lightning_autoparallel.plan import Activations, first_spec, make_plans, plan_document

if TYPE_CHECKING:
    from lightning_autoparallel.pipeline.stages import StageContext

_KEEPS = "plan auto: what is gathered for the forward stays so until the backward has read it"


def solved(
    captured: CapturedGraph, context: StageContext, costs: CostModel, room_bytes: float, activations: Activations
) -> tuple[Answer, ...]:
    """Its best, and others; then its best where all that is gathered stays so until the backward, if that is left open.

    The latter is asked only where more is exposed than that has to be worth. A plan for calls of modules gathers again:
    what one of them keeps would lie beside all that others do.

    Raises:
        InfeasiblePlanError: there is no room for any.
    """
    solve = partial(_answers, captured, context, costs, room_bytes, activations)
    again = context.config.gathers_again()
    answers = solve(gathered_again=again)
    may_pay = answers[0].exposed_share > 1 - 1 / KEEPING
    if context.config.reshard_after_forward == AUTO and not captured.local and may_pay:
        with contextlib.suppress(InfeasiblePlanError):  # there is no room for that
            (kept,) = solve(gathered_again=False, with_others=False)
            gathers = kept.stays_bytes != answers[0].stays_bytes  # else both are one
            answers += (kept,) if gathers and kept.stays_bytes <= room_bytes else ()
    return answers


def _answers(
    captured: CapturedGraph,
    context: StageContext,
    costs: CostModel,
    room_bytes: float,
    activations: Activations,
    gathered_again: bool,
    with_others: bool = True,
) -> tuple[Answer, ...]:
    plans = make_plans(
        captured,
        context.found.asked(context.config.plan),
        context.mesh,
        context.warn,
        costs=costs,
        room_bytes=room_bytes,
        explains=context.config.explain is not None,
        activations=activations,
        state=context.found.state,
        gathered_again=gathered_again,
        with_others=with_others,
    )
    answers = []
    for plan in plans:
        # On one rank there is nothing to place: what was asked for is whether it fits, and what is recomputed.
        spec = plan.found or first_spec(context.config.plan, context.mesh)
        document = plan_document(captured, plan, spec, context.mesh)
        unknown = () if context.found.why_unknown is None else (context.found.why_unknown,)
        keeps = (_KEEPS,) if plan.keeps_gathered else ()
        told = (*told_of_staying(context.found.pins), *_told_of_absent(context.config.plan, context.mesh))
        notes = (*plan.notes, *keeps, *told, *unknown)
        answers.append(
            Answer(
                spec=spec,
                document=document,
                notes=notes,
                solved=plan.solved,
                explain=plan.explain,
                stays_bytes=plan.stays_bytes,
                exposed_share=plan.exposed_share,
            )
        )
    return tuple(answers)


def _told_of_absent(spec: PlanSpec, mesh: ParallelMesh) -> tuple[str, ...]:
    """What is to be said of rules that name axes of one rank, or none: they do nothing here."""
    active = mesh.active(mesh.spec.names)
    idle = {rule.key: [name for name, _ in rule.placements if name not in active] for rule in spec.rules}
    return tuple(
        f"plan auto: what the rule of {key!r} says of {', '.join(names)} does nothing on mesh {mesh.spec}"
        for key, names in idle.items()
        if names
    )
