"""What was planned and what that is predicted to take: the values of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_autoparallel.contracts.placing import Explanation, SolvedProblem

LARGEST_SHOWN = 5  # of what is alive at a predicted peak
_BYTES = ("parameters_bytes", "training_peak_bytes", "gradients_bytes", "optimizer_bytes", "predicted_peak_bytes")
_TIMES = ("step_time_us", "around_us", "update_us", "tokens_per_second_per_device")


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
class PlacedCalls:
    """Equal calls by modules of one kind, ``count`` of them, that have their operands and results alike.

    ``module`` is the modules' path with asterisks for numbers, ``call`` the operator and the user's line.
    ``placements`` maps mesh axes to results and operands: ``S(0) from R, S(1)``; without those that share out the batch
    where a call was captured with a rank's own rows.
    """

    module: str
    call: str
    backward: bool
    count: int
    placements: Mapping[str, str]


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

    ``calls`` are those of the graph as it was captured.

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
    calls: tuple[PlacedCalls, ...] = ()
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
    solved: SolvedProblem | None = None  # of a plan that was found

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
            "calls": [asdict(calls) for calls in self.calls],
            "passes": [asdict(p) | _tables_json({"before": p.before, "after": p.after}) for p in self.passes],
            "notes": list(self.notes),
            "meshes": [asdict(trial) for trial in self.meshes],
            "explanation": None if self.explanation is None else asdict(self.explanation),
            "solved": None if self.solved is None else asdict(self.solved) | {"gap": self.solved.gap},
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
