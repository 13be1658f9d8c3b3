"""A planned step on its way through ``apply`` and ``passes``: its joint graph, the partition, and what that made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from torch import fx

from lightning_autoparallel.apply import lower_graph
from lightning_autoparallel.artifacts import ArtifactWriter
from lightning_autoparallel.config import AUTO, EngineConfig, policies_by_kind
from lightning_autoparallel.contracts import (
    CapturedGraph,
    EarlierGradients,
    PartitionedGraph,
    PassReport,
    ShardedGraph,
    ShardingPlan,
)
from lightning_autoparallel.cost import CostModel
from lightning_autoparallel.cost.memory import surroundings_of
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.passes import (
    DEFAULT_BYTES,
    AxesByGroup,
    BucketLimit,
    ChunkOptions,
    DecomposeOptions,
    GraphPass,
    joint_groups,
    joint_passes,
    run_passes,
    split_passes,
)
from lightning_autoparallel.pipeline.fastest_plan import RewrittenStep
from lightning_autoparallel.pipeline.least_time import least_time_us
from lightning_autoparallel.pipeline.memory_budget import room_of_passes
from lightning_autoparallel.pipeline.partitioning import Partitioning
from lightning_autoparallel.pipeline.progress import stage_clock
from lightning_autoparallel.pipeline.same_order import check_same_start

if TYPE_CHECKING:
    from lightning_autoparallel.pipeline.stages import StageContext


_Result = TypeVar("_Result")


class StepRewriting:
    """Takes a planned step to its final graphs: ``begin``, then ``finish``, or ``run``; every rank calls them alike."""

    partitioned: PartitionedGraph
    _sharded: ShardedGraph
    _is_part: bool
    _room_bytes: int | None
    _gathers_again: bool
    _partitioning: Partitioning
    _joint: tuple[GraphPass, ...]
    _ahead: tuple[GraphPass, ...]

    def __init__(self, name: str, context: StageContext, costs: CostModel, artifacts: ArtifactWriter) -> None:
        self._warnings: list[str] = []
        self._timings: dict[str, float] = {}
        self._clock = stage_clock(name, self._timings, context.progress)
        self._context = replace(context, warn=self._warnings.append, told=set())
        self._costs, self._artifacts = costs, artifacts
        self._groups = AxesByGroup(context.mesh)
        self._limit = _bucket_limit(context.config, costs)
        self._reports: list[PassReport] = []  # of the joint graph
        self._halves: dict[str, tuple[PassReport, ...]] = {}

    def begin(self, captured: CapturedGraph, plan: ShardingPlan) -> None:
        """Apply the plan, run passes over the joint graph, partition it, and settle which group moves what.

        Raises:
            PassError: ranks have different settings, or their graphs came out different.
        """
        self._apply(captured, plan)
        with self._clock("passes"):
            self._begin_passes()

    def least_us(self) -> float:
        """Microseconds that the graphs hardly take less than, as rank 0 finds; to be asked between the two."""
        own = self._together(lambda: least_time_us(self.partitioned, self._costs, self._limit))
        return float(self._context.control.told_by_first(own))

    def finish(self) -> RewrittenStep:
        """Run the other passes.

        Raises:
            PassError: ranks' graphs came out different.
        """
        with self._clock("passes"):
            self._finish_passes()
        return self._rewritten()

    def run(self, captured: CapturedGraph, plan: ShardingPlan) -> RewrittenStep:
        """Both, where nothing is asked between them: its passes are one stage of what is shown.

        Raises:
            PassError: ranks have different settings, or their graphs came out different.
        """
        self._apply(captured, plan)
        with self._clock("passes"):
            self._begin_passes()
            self._finish_passes()
        return self._rewritten()

    def _apply(self, captured: CapturedGraph, plan: ShardingPlan) -> None:
        self._captured, self._is_part = captured, captured.local
        self._gathers_again = self._context.config.gathers_again(plan.keeps_gathered)
        self._room_bytes = room_of_passes(captured, plan, self._context.found, self._costs.hardware)
        with self._clock("apply"):
            self._sharded = self._together(lambda: lower_graph(captured, plan, self._context.mesh.ordered_axis))

    def _begin_passes(self) -> None:
        self._prepare(self._earlier_gradients() if self._sharded.has_backward else "freed")
        # The last one may have it partitioned anew.
        self._ahead = self._joint[:-1] if self._sharded.has_backward else self._joint
        self._partition(self._ahead)
        if not self._sharded.has_backward:
            self._together(lambda: self._run_first(self.partitioned))

    def _finish_passes(self) -> None:
        if self._sharded.has_backward:
            self._partition(self._joint[len(self._ahead) :])
        self._together(lambda: self._run_behind(self._split_passes(self.partitioned)[1:], self.partitioned))

    def _rewritten(self) -> RewrittenStep:
        halves = [report for half in self.partitioned.graphs() for report in self._halves[half]]
        return RewrittenStep(
            partitioned=self.partitioned,
            passes=(*self._reports, *halves),
            warnings=tuple(self._warnings),
            timings=self._timings,
        )

    def _together(self, work: Callable[[], _Result]) -> _Result:
        """What ``work`` returns, where no rank fails at it: else all raise."""
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:  # raised again below, once every rank knows
            error = caught
        self._context.control.raise_together(error)
        return result

    def _earlier_gradients(self) -> EarlierGradients:
        """All ranks reckon alike, though one of them may have a hook that looks at gradients."""
        own = self._together(lambda: self._context.earlier_gradients(self._captured))
        stay, are_kept = self._context.control.any([own != "freed", own == "kept"])
        return "kept" if are_kept else "cleared" if stay else "freed"

    def _prepare(self, earlier_gradients: EarlierGradients) -> None:
        config, sharded = self._context.config, self._sharded
        # Without a backward what is partitioned is the joint graph itself, which passes are at work on.
        behind = self._run_first if sharded.has_backward else None
        self._partitioning = Partitioning(
            sharded, self._gathers_again, self._context.recomputing, earlier_gradients, behind
        )
        memory_of = self._partitioning.memory
        self._joint = joint_passes(sharded.inputs, sharded.outputs, _chunk_options(config), self._costs, memory_of)
        assert self._joint[-1].name == "chunk_loss_head", "only this one asks for partitions"

    def _partition(self, passes: Sequence[GraphPass]) -> None:
        """Run passes over the joint graph, and have it in parts."""
        before = self._partitioning.last
        self.partitioned = self._together(lambda: self._partitioned_behind(passes))
        if self._partitioning.last is not before:
            check_same_start(self.partitioned, _settings(self._context.config, self._costs), self._context.control)

    def _partitioned_behind(self, passes: Sequence[GraphPass]) -> PartitionedGraph:
        self._reports += self._run_over(self._sharded.graph_module, self._sharded.name, passes)
        return self._partitioning.partitioned(self._warn_of_idle)

    def _warn_of_idle(self, message: str) -> None:
        """Of a policy that finds nothing to recompute, if a user wrote it.

        A part of a step need not hold every kind of block that a policy names.
        """
        policy = self._context.recomputing
        by_kind = isinstance(policy, str) and bool(policies_by_kind(policy))
        is_found = self._context.config.activation_checkpointing == AUTO
        if not (is_found or (by_kind and self._is_part)):
            self._context.warn_once(message)

    def _run_first(self, partitioned: PartitionedGraph) -> None:
        """The pass after which it is settled which group moves what."""
        first = self._split_passes(partitioned)[:1]
        assert first[0].name == "fuse_chained_all_gathers", "no other one moves bytes from one group to another"
        self._halves = dict.fromkeys(partitioned.graphs(), ())
        self._run_behind(first, partitioned)

    def _split_passes(self, partitioned: PartitionedGraph) -> tuple[GraphPass, ...]:
        config, mesh, costs = self._context.config, self._context.mesh, self._costs
        room_bytes = self._partitioning.first_bytes if self._room_bytes is None else self._room_bytes
        around = partial(surroundings_of, partitioned, room_bytes=room_bytes)
        backend = _backend(mesh, costs)
        options = _decompose_options(config, backend)
        return split_passes(self._limit, joint_groups(mesh), costs, around, options, backend, config.disabled_passes)

    def _run_behind(self, passes: Sequence[GraphPass], partitioned: PartitionedGraph) -> None:
        """Over both halves, the backward first: the forward may take as much memory as it does."""
        for half, rewritten in reversed(partitioned.graphs().items()):
            self._halves[half] += self._run_over(rewritten, f"{self._sharded.name}.{half}", passes)

    def _run_over(self, graph_module: fx.GraphModule, name: str, passes: Sequence[GraphPass]) -> tuple[PassReport, ...]:
        disabled, begins = self._context.config.disabled_passes, self._context.progress.advance
        return run_passes(graph_module, name, passes, self._groups, self._artifacts, disabled, begins)


def _settings(config: EngineConfig, costs: CostModel) -> dict[str, object]:
    """What passes depend on besides the graphs, as all ranks can compare it."""
    return {
        "disabled_passes": sorted(config.disabled_passes),
        "bucket_mb": config.bucket_mb,
        "decompose_matmuls": config.decompose_matmuls,
        "loss_chunks": config.loss_chunks,
        "hardware or ranks_per_node": costs.hardware,
        "reshard_after_forward": config.reshard_after_forward,
    }


def _backend(mesh: ParallelMesh, costs: CostModel) -> str:
    """What process groups talk through, or would: a fake world is planned for what the hardware has."""
    return costs.hardware.backend if mesh.backend == "fake" else mesh.backend


def _decompose_options(config: EngineConfig, backend: str) -> DecomposeOptions:
    spec = config.decompose_matmuls
    return DecomposeOptions(when=spec.when, order=spec.order, depth=spec.depth, backend=backend)


def _chunk_options(config: EngineConfig) -> ChunkOptions:
    return ChunkOptions(chunks=None if config.loss_chunks == AUTO else int(config.loss_chunks))


def _bucket_limit(config: EngineConfig, costs: CostModel) -> BucketLimit:
    """Bytes that one launch may move: what the user allows, or the size at which latency is a twentieth of its time."""
    if config.bucket_mb is not None:
        most = int(config.bucket_mb * 1e6)
        return lambda kind, group: most
    return lambda kind, group: costs.saturating_bytes(kind, group, 0.95) if group in costs.groups else DEFAULT_BYTES
