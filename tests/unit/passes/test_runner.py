"""What the runner does around a pass."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from lightning_autoparallel.artifacts import ArtifactWriter
from lightning_autoparallel.contracts import CollectiveCount
from lightning_autoparallel.errors import PassError
from lightning_autoparallel.passes import GraphPass, all_passes, check_disabled, run_passes
from lightning_autoparallel.torch_compat import collectives

NOWHERE = ArtifactWriter(None)


def gather_twice() -> fx.GraphModule:
    """Two equal gathers of a (2, 4) float tensor over group ``g``."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 4)
    waits = []
    for _ in range(2):
        gathered = graph.call_function(collectives.ALL_GATHER, (x, 2, "g"))
        waits.append(graph.call_function(collectives.WAIT, (gathered,)))
        gathered.meta["val"] = waits[-1].meta["val"] = torch.empty(4, 4)
    graph.output(waits)
    return fx.GraphModule(torch.nn.Module(), graph)


def first_only(graph: fx.Graph) -> tuple[str, ...]:
    """Return the first gather twice and drop the second."""
    (output,) = [node for node in graph.nodes if node.op == "output"]
    output.args = ([output.args[0][0]] * 2,)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    return ("dropped one",)


def break_graph(graph: fx.Graph) -> tuple[str, ...]:
    """Use a value before it is there."""
    nodes = list(graph.nodes)
    nodes[1].args = (nodes[-2], 2, "g")
    return ()


FIRST = GraphPass(name="first", run=first_only)


def test_counts_before_and_after():
    module = gather_twice()
    (report,) = run_passes(module, "train", [FIRST], {"g": "dp_shard"}, NOWHERE)
    assert (report.name, report.graph, report.notes) == ("first", "train", ("dropped one",))
    assert (report.nodes_before, report.nodes_after) == (6, 4)
    assert report.before == {"all_gather": {"dp_shard": CollectiveCount(count=2, size_bytes=2 * 64)}}
    assert report.after == {"all_gather": {"dp_shard": CollectiveCount(count=1, size_bytes=64)}}
    assert report.seconds >= 0
    assert module.code.count("_c10d_functional.all_gather") == 1, "the module must be recompiled"


def test_passes_run_in_order():
    seen: list[str] = []
    passes = [GraphPass(name=name, run=lambda graph, name=name: seen.append(name) or ()) for name in "bca"]
    reports = run_passes(gather_twice(), "train", passes, {}, NOWHERE)
    assert seen == [report.name for report in reports] == ["b", "c", "a"]


def test_a_pass_is_switched_off_by_name():
    module = gather_twice()
    assert run_passes(module, "train", [FIRST], {}, NOWHERE, disabled=["first"]) == ()
    assert len(module.graph.nodes) == 6


def test_an_unknown_name_is_refused():
    check_disabled(["first"], [FIRST])
    with pytest.raises(PassError, match="no pass is called 'frist': passes are first"):
        check_disabled(["frist"], [FIRST])


def test_a_broken_graph_names_the_pass():
    with pytest.raises(PassError, match="pass breaks left a broken graph of train"):
        run_passes(gather_twice(), "train", [GraphPass(name="breaks", run=break_graph)], {}, NOWHERE)


def test_graphs_are_dumped_around_each_pass(tmp_path):
    run_passes(gather_twice(), "train", [FIRST], {}, ArtifactWriter(str(tmp_path)))
    dumps = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    (before,) = [text for name, text in dumps.items() if "first.before" in name]
    (after,) = [text for name, text in dumps.items() if "first.after" in name]
    assert before.count("all_gather_into_tensor") > after.count("all_gather_into_tensor") > 0


def test_names_of_the_passes_differ():
    names = [graph_pass.name for graph_pass in all_passes()]
    assert len(set(names)) == len(names) > 0
