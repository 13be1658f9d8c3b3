"""Split the joint graph in forward and backward, lower both, run them under autograd."""

from lightning_autoparallel.compile.backend import check_compiler, lower_partitioned
from lightning_autoparallel.compile.partition import partition_graph
from lightning_autoparallel.compile.step import run_step

__all__ = ["check_compiler", "lower_partitioned", "partition_graph", "run_step"]
