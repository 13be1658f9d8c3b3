"""Split the joint graph in forward and backward, lower both, run them under autograd."""

from lightning_autoparallel.compile.backend import check_compiler, lower_partitioned
from lightning_autoparallel.compile.blocks import find_blocks
from lightning_autoparallel.compile.dynamo_backend import autoparallel_backend
from lightning_autoparallel.compile.partition import partition_graph
from lightning_autoparallel.compile.retrace import retraceable
from lightning_autoparallel.compile.saved_values import backward_of, saved_values
from lightning_autoparallel.compile.specialize import specialize, specialize_partitioned
from lightning_autoparallel.compile.step_runner import forward_again, run_step
from lightning_autoparallel.compile.wiring import Wiring

__all__ = [
    "Wiring",
    "autoparallel_backend",
    "backward_of",
    "check_compiler",
    "find_blocks",
    "forward_again",
    "lower_partitioned",
    "partition_graph",
    "retraceable",
    "run_step",
    "saved_values",
    "specialize",
    "specialize_partitioned",
]
