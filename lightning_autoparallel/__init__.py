"""Train a LightningModule written for one device on a mesh of many."""

from lightning_autoparallel.callbacks import CollectiveMonitor, PeakMemoryMonitor, PlanReportCallback
from lightning_autoparallel.checkpoint import load_weights
from lightning_autoparallel.compile import autoparallel_backend
from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.contracts import NodeInfo
from lightning_autoparallel.lightning_compat import StrategyRegistry, refuse_other_flavour
from lightning_autoparallel.pipeline import parallelize
from lightning_autoparallel.strategy import AutoParallelStrategy

# Imported last: the name now means the function, and no longer the package of the planning stage, which is imported as
# `from lightning_autoparallel.plan import ...` all the same.
from lightning_autoparallel.strategy.planning import plan

__all__ = [
    "AutoParallelStrategy",
    "CollectiveMonitor",
    "MeshSpec",
    "NodeInfo",
    "PeakMemoryMonitor",
    "PlanReportCallback",
    "autoparallel_backend",
    "load_weights",
    "parallelize",
    "plan",
]

if "autoparallel" not in StrategyRegistry:
    StrategyRegistry.register(
        "autoparallel", AutoParallelStrategy, description="One joint graph, sharded over a device mesh"
    )
refuse_other_flavour("autoparallel", AutoParallelStrategy)
