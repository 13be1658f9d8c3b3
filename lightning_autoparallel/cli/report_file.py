"""Reports as ``plan --output`` writes them, read again: what is needed to compare two of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.fx.nodes import kind_of

Placed = tuple[str, ...]  # where calls have results and operands, on each axis that cuts any
_SIZES = {
    "parameters": "parameters_bytes",
    "gradients": "gradients_bytes",
    "optimizer": "optimizer_bytes",
    "peak, with parameters and optimizer": "training_peak_bytes",
}


@dataclass(frozen=True, kw_only=True)
class Lain:
    """How a parameter of global ``shape`` lies on the mesh."""

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    placements: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class CallKind:
    """Calls of one operator on one line of the user's, by modules of one kind."""

    module: str
    call: str
    backward: bool


@dataclass(frozen=True, kw_only=True)
class KindFigures:
    """What all modules of one kind compute, save for the backward and launch in a step, on one rank.

    Times are microseconds of computing, and of waiting for collectives.
    """

    computing_us: float = 0.0
    exposed_us: float = 0.0
    saved_bytes: int = 0
    launches: int = 0
    moved_bytes: int = 0

    def __add__(self, other: KindFigures) -> KindFigures:
        return KindFigures(
            computing_us=self.computing_us + other.computing_us,
            exposed_us=self.exposed_us + other.exposed_us,
            saved_bytes=self.saved_bytes + other.saved_bytes,
            launches=self.launches + other.launches,
            moved_bytes=self.moved_bytes + other.moved_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class PlanFigures:
    """The figures of one report, named as they are shown; None stands for what is not known.

    ``collectives`` are launches and bytes of one step, by mesh axes; ``kinds`` are by kind of module, None in a file
    of a version that did not write them, like ``samples``, the rows of a step; ``times_by_kind`` says whether their
    times are known. ``calls`` are counted by their placements on all axes, None in a file of such a version.
    """

    path: str
    plan: str
    mesh: Mapping[str, int]
    hardware: str
    parameters: Mapping[str, Lain]
    times_us: Mapping[str, float | None]
    collectives: Mapping[str, tuple[int, int]]
    sizes_bytes: Mapping[str, int | None]
    samples: int | None = None
    kinds: Mapping[str, KindFigures] | None = None
    calls: Mapping[CallKind, Mapping[Placed, int]] | None = None
    times_by_kind: bool = False


def read_report(path: str | Path) -> PlanFigures:
    """The figures in a report's file.

    Raises:
        ConfigError: no such file, or no report.
    """
    remedy = "give a file that `lightning-autoparallel plan --output FILE` has written"
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--compare {path} cannot be read ({error}): {remedy}") from error
    try:
        return figures_of(document, str(path))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"--compare {path} is no report of a plan ({type(error).__name__}: {error}): {remedy}"
        ) from error


def figures_of(document: Mapping[str, Any], path: str = "this") -> PlanFigures:
    """The figures of ``PlanReport.as_json()``.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is something else.
    """
    graphs = {name: document[name] for name in ("forward", "backward") if name in document}
    graphs = graphs or {"inference": document["inference"]}
    step_us, samples = _number(document["step_time_us"]), _whole(document.get("samples"))
    return PlanFigures(
        path=path,
        plan=str(document["plan"]),
        mesh={str(axis): int(size) for axis, size in document["mesh"].items()},
        hardware=str(document["hardware"].get("name")),
        parameters={name: _lain(written) for name, written in document["parameters"].items()},
        times_us={
            "step": step_us,
            "step, for each row of its batch": None if step_us is None or not samples else step_us / samples,
            "computing": _sum(graphs, "compute_us"),
            "exposed communication": _sum(graphs, "exposed_us"),
        },
        collectives=_by_axes(graphs),
        sizes_bytes={name: _whole(document[key]) for name, key in _SIZES.items()},
        samples=samples,
        kinds=_by_kind(document["modules"], graphs) if "modules" in document else None,
        calls=_by_call(document["calls"]) if "calls" in document else None,
        times_by_kind=all("by_module" in graph for graph in graphs.values()),
    )


def _by_kind(modules: Sequence[Mapping[str, Any]], graphs: Mapping[str, Any]) -> dict[str, KindFigures]:
    """Modules whose paths differ in numbers only together; of ``graphs``, which are those of a step."""
    found: dict[str, KindFigures] = {}

    def add(path: str, figures: KindFigures) -> None:
        found[kind_of(path)] = found.get(kind_of(path), KindFigures()) + figures

    for module in modules:
        counted = [
            one
            for graph, table in module["collectives"].items()
            if graph in graphs
            for per_axes in table.values()
            for one in per_axes.values()
        ]
        moved, launches = (sum(int(one[key]) for one in counted) for key in ("bytes", "count"))
        saved = int(module["saved_bytes"])
        add(str(module["path"]), KindFigures(saved_bytes=saved, launches=launches, moved_bytes=moved))
    for graph in graphs.values():
        for path, (computing_us, exposed_us) in graph.get("by_module", {}).items():
            add(str(path), KindFigures(computing_us=float(computing_us), exposed_us=float(exposed_us)))
    return found


def _by_call(calls: Sequence[Mapping[str, Any]]) -> dict[CallKind, dict[Placed, int]]:
    """Axes on which everything is whole are left out: meshes with and without them compute alike there."""
    found: dict[CallKind, dict[Placed, int]] = {}
    for one in calls:
        kind = CallKind(module=str(one["module"]), call=str(one["call"]), backward=bool(one["backward"]))
        placements = _by_mesh_axis(one["placements"])
        placed = tuple(f"{axis}: {text}" for axis, text in placements.items() if "(" in text)
        counts = found.setdefault(kind, {})
        counts[placed] = counts.get(placed, 0) + int(one["count"])
    return found


def _lain(written: Mapping[str, Any]) -> Lain:
    return Lain(
        shape=tuple(map(int, written["shape"])),
        local_shape=tuple(map(int, written["local_shape"])),
        placements=_by_mesh_axis(written["placements"]),
    )


def _by_mesh_axis(placements: Mapping[str, Any]) -> dict[str, str]:
    """Mesh axes that one plan treats alike, as one, and another does not, lie alike by either."""
    return {axis: str(text) for axes, text in placements.items() for axis in str(axes).split(",")}


def _by_axes(graphs: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    total: dict[str, tuple[int, int]] = {}
    for graph in graphs.values():
        for per_axes in graph["collectives"].values():
            for axes, counted in per_axes.items():
                launches, size = total.get(axes, (0, 0))
                total[axes] = (launches + int(counted["count"]), size + int(counted["bytes"]))
    return dict(sorted(total.items()))


def _sum(graphs: Mapping[str, Any], key: str) -> float | None:
    known = [float(graph[key]) for graph in graphs.values() if key in graph]
    return sum(known) if len(known) == len(graphs) else None


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)
