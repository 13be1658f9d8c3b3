"""Rewrites of sharded graphs: one file each, run in the order of ``order.py`` by ``runner.py``."""

from lightning_autoparallel.passes.order import joint_passes
from lightning_autoparallel.passes.runner import GraphPass, check_disabled, run_passes

__all__ = ["GraphPass", "check_disabled", "joint_passes", "run_passes"]
