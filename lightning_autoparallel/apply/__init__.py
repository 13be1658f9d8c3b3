"""Write the global graph and its plan out as the graph each rank runs, and shard the parameters to match."""

from lightning_autoparallel.apply.copies import copies_of, shard_copy, take_whole_tensors
from lightning_autoparallel.apply.gather import (
    gather_module,
    rebind,
    shard_like,
    sharded_state,
    shared_state,
    whole_state,
)
from lightning_autoparallel.apply.held_parameters import rebind_held
from lightning_autoparallel.apply.lower import lower_graph
from lightning_autoparallel.apply.materialise import materialise_module, materialise_whole
from lightning_autoparallel.apply.other_shards import followers, lie_anew
from lightning_autoparallel.apply.params import (
    ParameterLayout,
    Replacements,
    attached_kept,
    check_initialised,
    parameter_layouts,
    shard_module,
    share_buffers,
)
from lightning_autoparallel.apply.states import gathered, mapped_state
from lightning_autoparallel.apply.unreduced import UnreducedLayout

__all__ = [
    "ParameterLayout",
    "Replacements",
    "UnreducedLayout",
    "attached_kept",
    "check_initialised",
    "copies_of",
    "followers",
    "gather_module",
    "gathered",
    "lie_anew",
    "lower_graph",
    "mapped_state",
    "materialise_module",
    "materialise_whole",
    "parameter_layouts",
    "rebind",
    "rebind_held",
    "shard_copy",
    "shard_like",
    "shard_module",
    "sharded_state",
    "share_buffers",
    "shared_state",
    "take_whole_tensors",
    "whole_state",
]
