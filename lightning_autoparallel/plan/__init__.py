"""Choose a placement for every node; see README.md."""

from lightning_autoparallel.plan.activations import Activations
from lightning_autoparallel.plan.automatic import first_spec
from lightning_autoparallel.plan.explain_rules import explain_rules, matching
from lightning_autoparallel.plan.fingerprint import call_text, fingerprint_lines, first_difference
from lightning_autoparallel.plan.planner import make_plan, make_plans
from lightning_autoparallel.plan.store import is_of_graph, kept_plan_of, plan_document, read_plan, restore_plan

__all__ = [
    "Activations",
    "call_text",
    "explain_rules",
    "fingerprint_lines",
    "first_difference",
    "first_spec",
    "is_of_graph",
    "kept_plan_of",
    "make_plan",
    "make_plans",
    "matching",
    "plan_document",
    "read_plan",
    "restore_plan",
]
