"""What plan ``auto`` has found, as it is kept in checkpoints: a training that goes on does so by the same plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_autoparallel.config import PlanSpec
from lightning_autoparallel.contracts import CapturedGraph, CheckpointFunction, SolvedProblem
from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.pipeline.fastest_plan import Answer
from lightning_autoparallel.plan import is_of_graph

VERSION = 2  # another one where a field that is kept changes, those of what was solved among them


def policy_name(policy: str | CheckpointFunction) -> str:
    """A policy of activation checkpointing as text; of a function where it is defined."""
    if isinstance(policy, str):
        return policy
    defined = policy if hasattr(policy, "__qualname__") else type(policy)  # else a callable object
    return f"{defined.__module__}.{defined.__qualname__}"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a plan was found for, beside the graph: another answer may be better where any of it is another.

    ``policy`` is what it recomputes, ``recomputing`` and ``resharding`` what was asked for: ``auto`` leaves both open.
    """

    asked: str
    mesh: str
    hardware: str
    budget_bytes: float
    policy: str
    recomputing: str
    resharding: str

    @classmethod
    def of(
        cls,
        asked: PlanSpec,
        mesh: ParallelMesh,
        costs: CostModel,
        budget_bytes: float,
        policy: str | CheckpointFunction,
        recomputing: str | CheckpointFunction,
        resharding: bool | str,
    ) -> Question:
        """Everything as text, which files of every kind keep as it is."""
        return cls(
            asked=json.dumps(asked.as_written(), sort_keys=True),
            mesh=json.dumps(mesh.sizes),
            hardware=json.dumps(costs.hardware.as_json(), sort_keys=True, default=str),
            budget_bytes=budget_bytes,
            policy=policy_name(policy),
            recomputing=policy_name(recomputing),
            resharding=str(resharding),
        )


def kept(question: Question, found: Answer) -> dict[str, Any]:
    """What a checkpoint holds of a plan."""
    return {
        "version": VERSION,
        "question": dict(vars(question)),
        "document": json.dumps(found.document),
        "notes": list(found.notes),
        "solved": None if found.solved is None else asdict(found.solved),
    }


def answer_of(held: Mapping[str, Any] | None, question: Question, captured: CapturedGraph) -> Answer | None:
    """The plan of a checkpoint; None where it answers another question."""
    if held is None or held.get("version") != VERSION or held["question"] != vars(question):
        return None
    document = json.loads(held["document"])
    if not is_of_graph(document, captured):
        return None
    spec = replace(PlanSpec.parse({"base": document["base"], "rules": document["rules"]}), found=True)
    note = "plan auto: as it was found before the checkpoint that this training goes on from"
    solved = held.get("solved")  # checkpoints written before this was kept have none
    return Answer(
        spec=spec,
        document=document,
        notes=tuple(dict.fromkeys((*held["notes"], note))),
        solved=None if solved is None else SolvedProblem(**solved),
    )
