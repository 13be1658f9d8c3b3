"""Choose a placement for every node; see README.md."""

from lightning_autoparallel.plan.fingerprint import fingerprint_lines, first_difference
from lightning_autoparallel.plan.named import make_plan

__all__ = ["fingerprint_lines", "first_difference", "make_plan"]
