"""Plans that run the same graphs are told apart from those that only take as long."""

from __future__ import annotations

from dataclasses import replace

from lightning_autoparallel.cli.bench.measurements import Contender, Measurement, Runs
from lightning_autoparallel.cli.bench.same_graphs import graphs_digest, same_graph_lines
from lightning_autoparallel.contracts import GraphPrediction, ParameterReport, PlanReport, TimelineEvent

MEASURED = Measurement(step_ms=10.0, launches=8, peak_bytes=2048, startup_s=3.0, compile_s=None, losses=[4.0, 2.0])


def runs(*measured: Measurement, name: str) -> Runs:
    return Runs(contender=Contender(name=name), measured=measured)


def test_contenders_of_the_same_graphs_are_told():
    """Not one whose rounds differ, nor those of which nothing is known."""
    one, other = replace(MEASURED, graphs="a"), replace(MEASURED, graphs="b")
    found = [
        runs(one, one, name="plan auto"),
        runs(one, name="plan ddp"),
        runs(other, name="plan fsdp"),
        runs(other, one, name="plan tp"),
        runs(MEASURED, name="ddp"),
        runs(MEASURED, name="fsdp2"),
    ]
    (line,) = same_graph_lines(found)
    assert line.startswith("plan auto, plan ddp ran the same graphs")
    assert same_graph_lines(found[1:]) == []


def test_equal_graphs_are_told_by_calls_memory_and_shards():
    """On an axis of another name, too; not in another order, nor where other values live, nor of other shards."""

    def report(stream: str = "dp", order: str = "ab", live: int = 3, rows: int = 4) -> PlanReport:
        events = [
            TimelineEvent(name=n, stream=stream if n == "a" else "compute", start_us=0, duration_us=1) for n in order
        ]
        graph = GraphPrediction(
            time_us=1, compute_us=1, communication_us=1, exposed_us=0, peak_memory_bytes=1,
            events=tuple(events), live_bytes=(live,),
        )  # fmt: skip
        weight = ParameterReport(
            shape=(8, 4), local_shape=(rows, 4), dtype="float32", placements={stream: "S(0)"},
            parameter_bytes=1, gradient_bytes=1, optimizer_bytes=None,
        )  # fmt: skip
        return PlanReport(
            graph="step", mesh={stream: 2}, plan="auto", timings_s={}, collectives={"forward": {}}, saved_bytes=0,
            parameters_bytes=1, gradients_bytes=1, parameters={"w": weight}, predictions={"forward": graph},
        )  # fmt: skip

    same = graphs_digest(report())
    assert same is not None
    assert graphs_digest(report("dp_shard")) == same
    others = [report(order="ba"), report(live=4), report(rows=8)]
    assert len({same, *map(graphs_digest, others)}) == 4
    assert graphs_digest(replace(report(), predictions={})) is None
