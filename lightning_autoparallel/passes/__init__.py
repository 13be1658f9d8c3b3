"""Rewrites of sharded graphs: one file each, run in the order of ``order.py`` by ``runner.py``."""

from lightning_autoparallel.passes.bucket_collectives import DEFAULT_BYTES
from lightning_autoparallel.passes.bucketing import BucketLimit
from lightning_autoparallel.passes.decompose import DecomposeOptions
from lightning_autoparallel.passes.joint_groups import AxesByGroup, joint_groups
from lightning_autoparallel.passes.loss_head import ChunkOptions
from lightning_autoparallel.passes.order import all_passes, joint_passes, split_passes
from lightning_autoparallel.passes.runner import GraphPass, check_disabled, run_passes
from lightning_autoparallel.passes.scheduling.live import EXTRA_BYTES

__all__ = [
    "DEFAULT_BYTES",
    "EXTRA_BYTES",
    "AxesByGroup",
    "BucketLimit",
    "ChunkOptions",
    "DecomposeOptions",
    "GraphPass",
    "all_passes",
    "check_disabled",
    "joint_groups",
    "joint_passes",
    "run_passes",
    "split_passes",
]
