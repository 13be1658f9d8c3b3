"""The values handed from stage to stage, each frozen and printable; the flow is in ``pipeline``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Placement

from lightning_autoparallel.config import PlanSpec

InputKind = Literal["parameter", "buffer", "batch", "constant", "tangent"]
OutputKind = Literal["output", "log", "buffer", "gradient"]
Placements = tuple[Placement, ...]  # one per plan axis
LARGEST_SHOWN = 5  # of what is alive at a predicted peak
_BYTES = ("parameters_bytes", "training_peak_bytes", "gradients_bytes", "optimizer_bytes", "predicted_peak_bytes")
_TIMES = ("step_time_us", "around_us", "update_us", "tokens_per_second_per_device")
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
class NodePlacement:
    """Placements a node computes with: one entry per tensor argument, one per output (None: not a tensor)."""

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements | None, ...]


@dataclass(frozen=True, kw_only=True)
class OtherWay:
    """An alternative that was not taken: what the best plan with it costs more, or what rules it out.

    ``more_bytes`` stay on a rank: of parameters, gradients, moments, and what the backward reads. Where that is not
    ``proved`` it costs at most so much more, as the solver's time was up, or less by no more than its gap.
    """

    way: str
    more_us: float = math.inf
    more_bytes: float = 0.0
    ruled_out: str = ""
    proved: bool = True


@dataclass(frozen=True, kw_only=True)
class Explained:
    """What was taken for equal parameters or calls, ``count`` of them, and what else there was, the cheapest first.

    Beside those listed there are ``further`` alternatives, none of them cheaper, and ``unsolved`` ones.
    """

    what: str
    count: int
    taken: str
    others: tuple[OtherWay, ...] = ()
    further: int = 0
    unsolved: int = 0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a plan places what ``pattern`` matches as it does; ``note`` says how the figures came about."""

    pattern: str
    choices: tuple[Explained, ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """A placement for every node of one captured graph, and for every parameter its storage placement.

    ``joint_axes`` are groups of several. ``found`` is base and rules where no person wrote them, ``notes`` say how,
    ``explain`` why. The solver reckons ``stays_bytes`` on a rank, and ``exposed_share`` of the step to send parameters.
    """

    name: str
    axes: tuple[PlanAxis, ...]
    nodes: Mapping[str, NodePlacement]
    parameters: Mapping[str, Placements]
    outputs: tuple[Placements | None, ...]
    joint_axes: tuple[PlanAxis, ...] = ()
    found: PlanSpec | None = None
    notes: tuple[str, ...] = ()
    explain: Callable[[str], Explanation] | None = None
    stays_bytes: float = math.inf
    exposed_share: float = 1.0
    keeps_gathered: bool = False  # what is gathered stays so until the backward


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


GraphCallable = Callable[..., Any]  # takes a list of tensors, returns a list or tuple of tensors


@dataclass(frozen=True, kw_only=True)
class CollectiveCount:
    """Launches and bytes (of the larger side, per rank) of one kind of collective on one set of axes."""

    count: int = 0
    size_bytes: int = 0

    def __add__(self, other: CollectiveCount) -> CollectiveCount:
        return CollectiveCount(count=self.count + other.count, size_bytes=self.size_bytes + other.size_bytes)


CollectiveTable = Mapping[str, Mapping[str, CollectiveCount]]  # kind -> axes -> count


@dataclass(frozen=True, kw_only=True)
class PassReport:
    """What one pass did to one graph, collectives counted before and after."""

    name: str
    graph: str
    seconds: float
    nodes_before: int
    nodes_after: int
    before: CollectiveTable
    after: CollectiveTable
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ParameterReport:
    """How one parameter lies on the mesh, and its bytes on one rank: the largest shard's, its padding included.

    ``placements`` maps mesh axes to placements as rules spell them. ``optimizer_bytes`` is None while unknown.
    """

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    placements: Mapping[str, str]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModuleReport:
    """What the code of one module (its submodules apart) saves for the backward and launches, on one rank.

    ``path`` is the module's name; the empty one stands for what was computed outside any submodule.
    """

    path: str
    saved_bytes: int
    collectives: Mapping[str, CollectiveTable]


@dataclass(frozen=True, kw_only=True)
class TimelineEvent:
    """One call on one stream of a predicted timeline: ``"compute"``, or that of a process group."""

    name: str
    stream: str
    start_us: float
    duration_us: float

    @property
    def end_us(self) -> float:
        """When it is done."""
        return self.start_us + self.duration_us


@dataclass(frozen=True, kw_only=True)
class MemoryShare:
    """A storage alive at the predicted peak: who made it, its bytes, and the module whose code that is of.

    ``kind`` is that of an input or a result where it is one (``batch``, ``saved``, ``gradient``, ...), else
    ``collective`` or ``value``.
    """

    name: str
    size_bytes: int
    kind: str
    module: str


@dataclass(frozen=True, kw_only=True)
class GraphPrediction:
    """One graph on one rank, as its costs predict it.

    ``exposed_us`` is the time in which nothing computes. ``peak_memory_bytes`` counts everything alive but parameter
    shards and optimizer state; ``at_peak`` is what that was, largest first, ``live_bytes`` the bytes at every call.
    ``by_module`` has the parts of the computing and of the exposed time that are of each module's code, by its path.
    """

    time_us: float
    compute_us: float
    communication_us: float
    exposed_us: float
    peak_memory_bytes: int
    at_peak: tuple[MemoryShare, ...] = ()
    live_bytes: tuple[int, ...] = ()
    events: tuple[TimelineEvent, ...] = ()  # streams of process groups are called by their mesh axes
    by_module: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MeshTrial:
    """One mesh that ``mesh="auto"`` has tried: predicted times, bytes of one rank, or why it will not do.

    ``samples`` are taken at once, ``accumulation`` times for the global batch that was asked for. ``us_per_sample`` has
    its part of what comes once in an optimizer step, as far as that is known.
    """

    mesh: Mapping[str, int]
    fits: bool
    why_not: str | None = None
    us_per_sample: float | None = None
    step_time_us: float | None = None
    exposed_us: float | None = None
    taken_bytes: float | None = None
    samples: int | None = None
    accumulation: int = 1


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """What was planned for one captured step; counts come from the final graphs (predicted, not measured).

    Bytes are those of one rank. ``saved_bytes`` are the values that the forward keeps for the backward, parameters and
    the batch not counted. ``predictions`` are missing where something has no known cost: ``notes`` say what.
    ``predicted_peak_bytes`` is the largest peak of the step's graphs, also where their times are unknown. ``samples``
    and ``tokens`` are those of one step's global batch; ``tokens`` is None where no matrix of indices is in it.
    ``around_us`` is what a training step is predicted to take beside its graphs, on hardware where that was measured;
    ``update_us`` is the optimizer's part of it, known of all hardware.
    """

    graph: str
    mesh: Mapping[str, int]
    plan: str
    timings_s: Mapping[str, float]
    collectives: Mapping[str, CollectiveTable]  # "forward" | "backward" | "inference"
    saved_bytes: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int | None = None  # None: unknown
    parameters: Mapping[str, ParameterReport] = field(default_factory=dict)
    modules: tuple[ModuleReport, ...] = ()
    passes: tuple[PassReport, ...] = ()
    predicted_peak_bytes: int | None = None
    notes: tuple[str, ...] = ()
    hardware: Mapping[str, Any] = field(default_factory=dict)
    predictions: Mapping[str, GraphPrediction] = field(default_factory=dict)
    samples: int | None = None
    tokens: int | None = None
    around_us: float | None = None
    update_us: float = 0.0
    meshes: tuple[MeshTrial, ...] = ()  # the best first; empty where the mesh was given
    explanation: Explanation | None = None

    @property
    def step_graphs(self) -> tuple[str, ...]:
        """The graphs of one step: forward and backward, or the one that there is."""
        return tuple(name for name in self.collectives if name != "inference") or ("inference",)

    @property
    def step_time_us(self) -> float | None:
        """Predicted microseconds of forward and backward (or of the one graph that there is); None if unknown.

        The optimizer, clipping, reading data and a second micro-batch are not in it.
        """
        known = [self.predictions[name].time_us for name in self.step_graphs if name in self.predictions]
        return sum(known) if len(known) == len(self.step_graphs) else None

    @property
    def whole_step_us(self) -> float | None:
        """Predicted microseconds of a training step with everything around its graphs; None if unknown."""
        if self.step_time_us is None or self.around_us is None:
            return None
        return self.step_time_us + self.around_us

    @property
    def training_peak_bytes(self) -> int | None:
        """Predicted bytes that are alive on one rank at most: parameters, the optimizer's state, and the largest peak.

        An optimizer whose state is not known is taken to keep two values per parameter, as AdamW. None if unknown.
        """
        if self.predicted_peak_bytes is None:
            return None
        optimizer = 2 * self.parameters_bytes if self.optimizer_bytes is None else self.optimizer_bytes
        return self.parameters_bytes + optimizer + self.predicted_peak_bytes

    @property
    def tokens_per_second_per_device(self) -> float | None:
        """Predicted, from ``step_time_us``."""
        if self.tokens is None or not self.step_time_us:
            return None
        return self.tokens / math.prod(self.mesh.values()) / self.step_time_us * 1e6

    def launches(self) -> dict[str, int]:
        """Collectives of one step by mesh axes, forward and backward together."""
        total: dict[str, int] = {}
        for name, table in self.collectives.items():
            for per_axes in table.values() if name != "inference" or len(self.collectives) == 1 else ():
                for axes, counted in per_axes.items():
                    total[axes] = total.get(axes, 0) + counted.count
        return total

    def as_json(self) -> dict[str, Any]:
        """The report as numbers, strings, lists and mappings: what every report.json holds."""
        kept = {name: self.saved_bytes if name == "forward" else 0 for name in self.collectives}
        graphs = {
            name: {"collectives": _table_json(table), "saved_bytes": kept[name]}
            | _prediction_json(self.predictions.get(name))
            for name, table in self.collectives.items()
        }
        return {
            "graph": self.graph,
            "plan": self.plan,
            "mesh": dict(self.mesh),
            "timings_s": dict(self.timings_s),
            **graphs,
            **{name: getattr(self, name) for name in (*_BYTES, *_TIMES, "samples", "tokens")},
            "hardware": dict(self.hardware),
            "parameters": {name: asdict(parameter) for name, parameter in self.parameters.items()},
            "modules": [asdict(m) | {"collectives": _tables_json(m.collectives)} for m in self.modules],
            "passes": [asdict(p) | _tables_json({"before": p.before, "after": p.after}) for p in self.passes],
            "notes": list(self.notes),
            "meshes": [asdict(trial) for trial in self.meshes],
            "explanation": None if self.explanation is None else asdict(self.explanation),
        }


def _tables_json(tables: Mapping[str, CollectiveTable]) -> dict[str, Any]:
    return {name: _table_json(table) for name, table in tables.items()}


def _table_json(table: CollectiveTable) -> dict[str, dict[str, dict[str, int]]]:
    return {
        kind: {axes: {"count": one.count, "bytes": one.size_bytes} for axes, one in sorted(per_axes.items())}
        for kind, per_axes in sorted(table.items())
    }


def _prediction_json(predicted: GraphPrediction | None) -> dict[str, Any]:
    """The figures of one graph; without its events and its curve, which have files of their own."""
    if predicted is None:
        return {}
    figures = ("time_us", "compute_us", "communication_us", "exposed_us", "peak_memory_bytes", "by_module")
    largest = [asdict(share) for share in predicted.at_peak[:LARGEST_SHOWN]]
    return {name: getattr(predicted, name) for name in figures} | {"largest_at_peak": largest}


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """Two callables and what is needed to call them; ``compile.step`` runs it under autograd."""

    partitioned: PartitionedGraph
    forward: GraphCallable
    backward: GraphCallable | None
    captured: CapturedGraph
    constants: tuple[Tensor, ...]
    report: PlanReport
    has_random_ops: bool = False
