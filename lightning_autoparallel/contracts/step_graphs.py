"""A step as graphs: as captured, placed on a mesh, and split in forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Placement

InputKind = Literal["parameter", "buffer", "batch", "constant", "tangent"]
OutputKind = Literal["output", "log", "buffer", "gradient"]
Placements = tuple[Placement, ...]  # one per plan axis
Decision = Literal["save", "recompute"]
Wish = Literal["save", "recompute", "prefer_recompute"]
# Of the step before: gone before the forward, gone between it and the backward, or there through both, to be added to.
EarlierGradients = Literal["freed", "cleared", "kept"]


@dataclass(frozen=True, kw_only=True)
class GraphInput:
    """One placeholder of a graph: what it stands for, and for batch leaves whether dim 0 is the batch."""

    kind: InputKind
    name: str
    batched: bool = False
    requires_grad: bool = False


@dataclass(frozen=True, kw_only=True)
class GraphOutput:
    """One output of a graph; ``name`` is a parameter or buffer name, or a position for outputs and logs.

    A gradient is ``of`` a parameter, or of a leaf of the batch, whose path ``name`` then is. ``batch_dim`` is the dim
    of an output or log that is the batch, None where there is none.
    """

    kind: OutputKind
    name: str
    of: InputKind = "parameter"
    batch_dim: int | None = None

    @property
    def is_parameter_gradient(self) -> bool:
        """Whether it is to lie as its parameter is stored."""
        return self.kind == "gradient" and self.of == "parameter"


@dataclass(frozen=True, kw_only=True)
class PassedOn:
    """Stands among static results for a tensor of the batch, the one at ``position``, that is returned as it is."""

    position: int


@dataclass(frozen=True, kw_only=True)
class CapturedGraph:
    """The step as one joint graph of the *global* program: placeholders and nodes carry global shapes.

    A ``local`` one is the program of one batch shard: shapes are those of its rows, every value is its own, and
    gradients of parameters are to be averaged over the shards. On axes that do not share out the batch it is global.
    """

    name: str
    graph_module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    output_spec: Any  # torch's pytree spec of what the step returned
    static_outputs: Mapping[int, Any] = field(default_factory=dict)
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    has_backward: bool = False
    local: bool = False


@dataclass(frozen=True, kw_only=True)
class PlanAxis:
    """Mesh axes that a plan always treats alike, as one axis: the group of their flattened mesh."""

    mesh_axes: tuple[str, ...]
    size: int
    rank: int
    group_name: str

    @property
    def name(self) -> str:
        """The mesh axes in order, joined by a comma: the key of every report."""
        return ",".join(self.mesh_axes)

    @property
    def shards_batch(self) -> bool:
        """Whether ranks along the axis see different rows of the batch."""
        return self.mesh_axes[0].startswith("dp_")


@dataclass(frozen=True, kw_only=True)
class ShardedGraph:
    """The joint graph each rank runs: local shapes, collectives written out."""

    name: str
    graph_module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    output_placements: tuple[Placements | None, ...]
    axes: tuple[PlanAxis, ...]
    has_backward: bool


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """One operator of the forward, as functions that decide about activation checkpointing are told of it.

    ``shape`` (of one rank's part) and ``dtype`` are those of its first result, ``size_bytes`` counts all of them.
    ``module`` is the path of the module whose code calls it, ``block`` that of the repeated module around, None outside
    of any. ``leaves_block``: code outside of the block reads the result. ``source`` is the user's line.
    """

    name: str
    op: str  # "aten.mm.default"
    module: str
    block: str | None
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    leaves_block: bool
    source: str


CheckpointFunction = Callable[[NodeInfo], Wish]


@dataclass(frozen=True, kw_only=True)
class PartitionedGraph:
    """The sharded graph split in two.

    ``forward`` takes the inputs without tangents and returns the results, then ``saved_values`` more tensors.
    ``backward`` takes the inputs at ``saved_inputs``, those tensors, then the tangents, and returns the gradients.
    ``decisions`` say for every call of the forward, by its name, whether the backward, where it needs the value, reads
    what was saved or recomputes it. A recomputed call has the same name in both graphs until passes rewrite them.
    ``earlier_gradients`` are those that lie on a rank as it begins.
    """

    sharded: ShardedGraph
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved_inputs: tuple[int, ...] = ()
    saved_values: int = 0
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    earlier_gradients: EarlierGradients = "cleared"

    def graphs(self) -> dict[str, fx.GraphModule]:
        """The graphs by their names in reports: ``forward`` and ``backward``, or ``inference`` alone."""
        if self.backward is None:
            return {"inference": self.forward}
        return {"forward": self.forward, "backward": self.backward}
