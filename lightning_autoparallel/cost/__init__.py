"""Predicted times; every quantity carries its unit in its name."""

from lightning_autoparallel.cost.groups import GroupShape, group_shape, group_shapes, mesh_groups
from lightning_autoparallel.cost.hardware import HARDWARE, HardwareSpec, LinkSpec, hardware_from, hardware_named
from lightning_autoparallel.cost.model import CostModel
from lightning_autoparallel.cost.timeline import Timeline, TimelineEvent, predict_timeline

__all__ = [
    "HARDWARE",
    "CostModel",
    "GroupShape",
    "HardwareSpec",
    "LinkSpec",
    "Timeline",
    "TimelineEvent",
    "group_shape",
    "group_shapes",
    "hardware_from",
    "hardware_named",
    "mesh_groups",
    "predict_timeline",
]
