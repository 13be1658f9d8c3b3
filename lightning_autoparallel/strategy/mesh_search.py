"""``mesh="auto"`` of planning: the step is planned on the meshes that the ranks can form, and the meshes are ranked.

First ``dp_replicate`` is what goes between nodes, for every ``tp``; then, for the ``tp`` of the best, other ways to
share its ranks out between ``dp_replicate`` and ``dp_shard`` are planned too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lightning_autoparallel.config import AUTO, MeshSpec, PlanSpec
from lightning_autoparallel.contracts import MeshTrial, PlanReport
from lightning_autoparallel.errors import AutoParallelError, CaptureError, ConfigError, InfeasiblePlanError

USABLE = 0.9  # of a device's memory, as where a plan is found
MOST_SPLITS = 6  # of data-parallel ranks, beside that by nodes: each takes a whole plan


def meshes(plan: PlanSpec, world_size: int, ranks_per_node: int) -> tuple[MeshSpec, ...]:
    """The meshes of up to three axes that a plan can use.

    ``tp`` stays inside of a node; ``dp_replicate`` is what goes between nodes, where a plan treats it apart. An axis
    that the plan would leave idle is left out.
    """
    node = math.gcd(world_size, ranks_per_node)
    cuts = [size for size in range(1, node + 1) if node % size == 0] if _uses(plan, "tp") else [1]
    found = []
    for tensor_parallel in cuts:
        ranks = world_size // tensor_parallel
        inside = node // tensor_parallel
        data_parallel: list[tuple[tuple[str, int], ...]] = [(("dp_shard", ranks),)]
        if _apart(plan) and 1 < inside < ranks:
            data_parallel.append((("dp_replicate", ranks // inside), ("dp_shard", inside)))
        for axes in data_parallel:
            shares = tuple((name, size) for name, size in axes if size > 1)
            found.append((*shares, ("tp", tensor_parallel)) if tensor_parallel > 1 else shares or axes)
    return tuple(dict.fromkeys(MeshSpec(axes=axes) for axes in found))


def other_splits(plan: PlanSpec, ranks_per_node: int, mesh: MeshSpec) -> tuple[MeshSpec, ...]:
    """Meshes with the ``tp`` of this one and other sizes of ``dp_replicate`` and ``dp_shard`` than ``meshes`` gives it.

    Those come first whose shards are most like the part of a node that is not ``tp``'s.
    """
    if not _apart(plan):
        return ()
    sizes = dict(mesh.axes)
    tensor_parallel = sizes.get("tp", 1)
    ranks = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    inside = math.gcd(ranks * tensor_parallel, ranks_per_node) // tensor_parallel
    shards = [size for size in range(2, ranks) if ranks % size == 0 and size != inside]
    nearest = sorted(shards, key=lambda size: abs(math.log(size / inside)))[:MOST_SPLITS]
    inner = (("tp", tensor_parallel),) if tensor_parallel > 1 else ()
    return tuple(MeshSpec(axes=(("dp_replicate", ranks // size), ("dp_shard", size), *inner)) for size in nearest)


def _apart(plan: PlanSpec) -> bool:
    """Whether a plan treats ``dp_replicate`` and ``dp_shard`` apart."""
    return plan.base in ("hsdp", AUTO) or "dp_replicate" in plan.axes()


def _uses(plan: PlanSpec, axis: str) -> bool:
    return plan.base == AUTO or axis in plan.axes()


def search(
    candidates: Sequence[MeshSpec],
    plan_on: Callable[[MeshSpec], PlanReport],
    global_batch_size: int | None,
    budget_gib: float | None,
    others_like: Callable[[MeshSpec], Sequence[MeshSpec]] = lambda mesh: (),
    accumulation: int = 1,
) -> PlanReport:
    """The report of the mesh predicted to take least time per sample of those that fit, with all meshes ranked.

    Args:
        candidates: the meshes to try.
        plan_on: plans the step on one of them.
        others_like: more meshes to try, like the best of the candidates.
        accumulation: micro-batches of one optimizer step, where no global batch size says how many.
        global_batch_size: rows of one optimizer step; a mesh must get there by whole micro-batches.
        budget_gib: what a rank may use; nine tenths of the device's memory if None.

    Raises:
        CaptureError: the step cannot be captured.
        ConfigError: no times are known.
        InfeasiblePlanError: no mesh will do; the message has the reason for each.
        AutoParallelError: what is wrong on every mesh alike.
    """
    reports: dict[MeshSpec, PlanReport] = {}
    trials: list[MeshTrial] = []
    errors: list[AutoParallelError] = []

    def try_on(mesh: MeshSpec) -> None:
        known = next((_samples_on(mesh, other, report) for other, report in reports.items()), 0)
        if misses := _rows(known, global_batch_size):  # without planning it
            trials.append(MeshTrial(mesh=dict(mesh.axes), fits=False, why_not="; ".join(misses), samples=known))
            return
        try:
            report = plan_on(mesh)
        except CaptureError:
            raise
        except AutoParallelError as error:  # this mesh will not do; another may
            errors.append(error)
            trials.append(MeshTrial(mesh=dict(mesh.axes), fits=False, why_not=str(error)))
            return
        reports[mesh] = report
        trials.append(_trial(mesh, report, global_batch_size, budget_gib, accumulation))

    for mesh in candidates:
        try_on(mesh)
    best = _ranked(trials)[0]
    for mesh in others_like(MeshSpec(axes=tuple(best.mesh.items()))) if best.fits else ():
        try_on(mesh)
    ranked = _ranked(trials)
    if not ranked[0].fits:
        if errors and len(errors) == len(ranked) and len({str(error) for error in errors}) == 1:
            raise errors[0]  # whatever the mesh
        reasons = "; ".join(f"{MeshSpec(axes=tuple(one.mesh.items()))}: {one.why_not}" for one in ranked)
        raise InfeasiblePlanError(f"no mesh of these ranks will do. {reasons}")
    report = reports[MeshSpec(axes=tuple(ranked[0].mesh.items()))]
    return replace(report, meshes=tuple(ranked))


def _ranked(trials: Sequence[MeshTrial]) -> list[MeshTrial]:
    """The fastest of those that fit first."""
    return sorted(trials, key=lambda one: (not one.fits, one.us_per_sample or math.inf))


def _trial(
    mesh: MeshSpec, report: PlanReport, global_batch_size: int | None, budget_gib: float | None, accumulation: int
) -> MeshTrial:
    """One mesh, from its report.

    Raises:
        ConfigError: its times, or the rows of a step, are not known: then nothing can be ranked.
    """
    if report.step_time_us is None or not report.samples:
        unknown = "the step's time is" if report.step_time_us is None else "the rows of a step are"
        raise ConfigError(
            f"mesh 'auto' ranks meshes by predicted time per sample, but {unknown} not known: "
            f"{'; '.join(report.notes) or 'no dim of the batch is marked as rows'}; name a mesh instead"
        )
    if global_batch_size is not None:
        accumulation = max(1, global_batch_size // report.samples)
    once_us = report.update_us
    host_us = 0.0 if report.around_us is None else report.around_us - once_us
    taken = _taken_bytes(report)
    reasons = _reasons(report, taken, global_batch_size, budget_gib)
    return MeshTrial(
        mesh=dict(mesh.axes),
        fits=not reasons,
        why_not="; ".join(reasons) or None,
        us_per_sample=(report.step_time_us + host_us + once_us / accumulation) / report.samples,
        step_time_us=report.step_time_us,
        exposed_us=sum(report.predictions[name].exposed_us for name in report.step_graphs),
        taken_bytes=taken,
        samples=report.samples,
        accumulation=accumulation,
    )


def _taken_bytes(report: PlanReport) -> float | None:
    """What is alive at most, and reserved beyond that on hardware where it is known."""
    alive = report.training_peak_bytes
    return None if alive is None else alive * (1 + (report.hardware.get("reserved_share") or 0.0))


def _reasons(
    report: PlanReport, taken: float | None, global_batch_size: int | None, budget_gib: float | None
) -> list[str]:
    reasons = list(_memory(taken, budget_gib, report.hardware.get("memory_bytes")))
    assert report.samples
    return [*reasons, *_rows(report.samples, global_batch_size)]


def _samples_on(mesh: MeshSpec, planned: MeshSpec, report: PlanReport) -> int:
    """Rows that a mesh takes at once, by the report of another one: each data-parallel rank takes as many."""
    shards, known = (math.prod(size for name, size in each.axes if name.startswith("dp_")) for each in (mesh, planned))
    return (report.samples or 0) // known * shards


def _rows(samples: int, global_batch_size: int | None) -> list[str]:
    """Why so many rows at once do not make up the global batch."""
    if global_batch_size is None or samples < 1:
        return []
    if samples > global_batch_size:
        return [f"takes {samples} rows at once, more than {global_batch_size}: have fewer rows on a rank"]
    if global_batch_size % samples:
        return [f"{global_batch_size} rows are no multiple of the {samples} that it takes at once"]
    return []


def _memory(taken: float | None, budget_gib: float | None, device_bytes: float | None) -> Iterator[str]:
    budget = budget_gib * 2**30 if budget_gib is not None else USABLE * (device_bytes or math.inf)
    if taken is not None and taken > budget:
        yield f"takes {taken / 2**30:.3g} GiB of a rank, which may use {budget / 2**30:.3g}"
