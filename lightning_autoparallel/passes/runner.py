"""Run passes over a graph: switch off by name, lint, time, count collectives before and after, dump."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from lightning_autoparallel.artifacts import ArtifactWriter
from lightning_autoparallel.contracts import CollectiveTable, PassReport
from lightning_autoparallel.errors import BrokenGraphError, PassError
from lightning_autoparallel.fx.nodes import count_collectives


@dataclass(frozen=True, kw_only=True)
class GraphPass:
    """A named rewrite of a graph in place; ``run`` has its options bound and returns notes for the report."""

    name: str
    run: Callable[[fx.Graph], tuple[str, ...]]


def check_disabled(disabled: Sequence[str], passes: Sequence[GraphPass]) -> None:
    """Refuse names that are no pass.

    Raises:
        PassError: an unknown name.
    """
    known = [graph_pass.name for graph_pass in passes]
    for name in disabled:
        if name not in known:
            raise PassError(f"no pass is called {name!r}: passes are {', '.join(known)}")


def run_passes(
    graph_module: fx.GraphModule,
    graph_name: str,
    passes: Sequence[GraphPass],
    axes_by_group: Mapping[str, str],
    artifacts: ArtifactWriter,
    disabled: Sequence[str] = (),
    begins: Callable[[str], None] = lambda name: None,
) -> tuple[PassReport, ...]:
    """Run ``passes`` in order on ``graph_module``, in place, but those named in ``disabled``.

    ``begins`` is told the name of each before it runs.

    Raises:
        PassError: a pass left a graph that does not lint.
    """
    reports: list[PassReport] = []
    collectives: CollectiveTable = count_collectives(graph_module.graph, axes_by_group)
    for graph_pass in passes:
        if graph_pass.name not in disabled:
            begins(graph_pass.name)
            reports.append(_run_one(graph_module, graph_name, graph_pass, axes_by_group, artifacts, collectives))
            collectives = reports[-1].after
    graph_module.recompile()  # passes and dumps read the graph only
    return tuple(reports)


def _run_one(
    graph_module: fx.GraphModule,
    graph_name: str,
    graph_pass: GraphPass,
    axes_by_group: Mapping[str, str],
    artifacts: ArtifactWriter,
    before: CollectiveTable,
) -> PassReport:
    graph = graph_module.graph
    nodes_before = len(graph.nodes)
    artifacts.graph(f"{graph_name}/{graph_pass.name}.before", graph_module)
    start = time.perf_counter()
    notes = graph_pass.run(graph)
    seconds = time.perf_counter() - start
    try:
        graph.lint()
    except RuntimeError as error:
        raise BrokenGraphError(f"pass {graph_pass.name} left a broken graph of {graph_name}: {error}") from error
    artifacts.graph(f"{graph_name}/{graph_pass.name}.after", graph_module)
    return PassReport(
        name=graph_pass.name,
        graph=graph_name,
        seconds=seconds,
        nodes_before=nodes_before,
        nodes_after=len(graph.nodes),
        before=before,
        after=count_collectives(graph, axes_by_group),
        notes=notes,
    )
