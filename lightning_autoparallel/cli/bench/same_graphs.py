"""Which contenders ran the same graphs: however long each took, they differ by what measuring them differs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from lightning_autoparallel.cli.bench.measurements import Runs
from lightning_autoparallel.contracts import PlanReport


def graphs_digest(report: PlanReport) -> str | None:
    """A short text for the calls of a step in their order and times, what is alive at each, and parameters' shards.

    Axes may have other names: streams of collectives are told by which came first. None where the step's times could
    not be predicted: its calls are not told then.
    """
    if report.step_time_us is None:
        return None
    streams: dict[str, int] = {}
    calls = [
        (event.name, streams.setdefault(event.stream, len(streams)), event.start_us, event.duration_us)
        for name in report.step_graphs
        for event in report.predictions[name].events
    ]
    live = [report.predictions[name].live_bytes for name in report.step_graphs]
    shards = sorted((name, lain.local_shape) for name, lain in report.parameters.items())
    return hashlib.blake2b(repr((calls, live, shards)).encode(), digest_size=6).hexdigest()


def same_graph_lines(all_runs: Sequence[Runs]) -> list[str]:
    """A line for contenders of which all rounds ran the same graphs."""
    by_graphs: dict[str, list[str]] = {}
    for runs in all_runs:
        ran = {run.graphs for run in runs.measured}
        if len(ran) == 1 and (graphs := ran.pop()) is not None:
            by_graphs.setdefault(graphs, []).append(runs.contender.name)
    return [
        f"{', '.join(names)} ran the same graphs, call by call: what their times differ by is measuring"
        for names in by_graphs.values()
        if len(names) > 1
    ]
