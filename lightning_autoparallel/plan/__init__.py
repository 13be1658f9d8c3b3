"""Choose a placement for every node; see README.md."""

from lightning_autoparallel.plan.named import make_plan
from lightning_autoparallel.plan.fingerprint import first_difference, fingerprint_lines

__all__ = ["fingerprint_lines", "first_difference", "make_plan"]
