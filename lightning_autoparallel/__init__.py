"""Train a LightningModule written for one device on a mesh of many."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_autoparallel.callbacks import CollectiveMonitor, PeakMemoryMonitor, PlanReportCallback
from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.pipeline import parallelize
from lightning_autoparallel.strategy import AutoParallelStrategy

__all__ = [
    "AutoParallelStrategy",
    "CollectiveMonitor",
    "MeshSpec",
    "PeakMemoryMonitor",
    "PlanReportCallback",
    "parallelize",
]

if "autoparallel" not in StrategyRegistry:
    StrategyRegistry.register(
        "autoparallel", AutoParallelStrategy, description="One joint graph, sharded over a device mesh"
    )
