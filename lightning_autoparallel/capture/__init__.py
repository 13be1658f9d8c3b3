"""Run the step once on fake tensors and record it as one joint graph; see README.md."""

from lightning_autoparallel.capture.batch import BatchLayout, BatchLeaf, check_rows, describe_batch, row_positions
from lightning_autoparallel.capture.call_layouts import describe_call
from lightning_autoparallel.capture.edges import check_edges
from lightning_autoparallel.capture.effects import NoEffects, StepEffects
from lightning_autoparallel.capture.leaf_stand_ins import leaf_counters
from lightning_autoparallel.capture.leaves import check_same_leaves, flatten_batch, ragged_part
from lightning_autoparallel.capture.modes import ModuleStates, Numbers, Structures
from lightning_autoparallel.capture.state import StepState
from lightning_autoparallel.capture.step import StepRequest, TensorSpec, capture_step
from lightning_autoparallel.capture.watch import Guard, Watcher, exact_repeats
from lightning_autoparallel.capture.writes import made_again

__all__ = [
    "BatchLayout",
    "BatchLeaf",
    "Guard",
    "ModuleStates",
    "NoEffects",
    "Numbers",
    "StepEffects",
    "StepRequest",
    "StepState",
    "Structures",
    "TensorSpec",
    "Watcher",
    "capture_step",
    "check_edges",
    "check_rows",
    "check_same_leaves",
    "describe_batch",
    "describe_call",
    "exact_repeats",
    "flatten_batch",
    "leaf_counters",
    "made_again",
    "ragged_part",
    "row_positions",
]
