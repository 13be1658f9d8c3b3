"""The stages in order (``stages.py``), and the engine that captures, keeps and runs steps."""

from lightning_autoparallel.pipeline.agreement import ControlGroup
from lightning_autoparallel.pipeline.engine import StepCall, StepEngine, StepResult
from lightning_autoparallel.pipeline.parallelize import ParallelModule, parallelize
from lightning_autoparallel.pipeline.seeds import Draws

__all__ = ["ControlGroup", "Draws", "ParallelModule", "StepCall", "StepEngine", "StepResult", "parallelize"]
