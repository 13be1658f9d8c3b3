"""Write the global graph and its plan out as the graph each rank runs, and shard the parameters to match."""

from lightning_autoparallel.apply.lower import lower_graph
from lightning_autoparallel.apply.params import (
    ParameterLayout,
    Replacements,
    check_initialised,
    materialise_module,
    parameter_layouts,
    shard_module,
    share_buffers,
)

__all__ = [
    "ParameterLayout",
    "Replacements",
    "check_initialised",
    "lower_graph",
    "materialise_module",
    "parameter_layouts",
    "shard_module",
    "share_buffers",
]
