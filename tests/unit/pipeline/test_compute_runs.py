"""Two layers of the 8B recipe on sixteen by eight ranks: how many products run between two reductions of gradients."""

from __future__ import annotations

import pytest
from torch import fx

from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.passes.cap_compute_runs import cap_compute_runs
from lightning_autoparallel.passes.scheduling.calls import is_heavy
from tests.benchmarks.torch_scheduler import BUCKETS, RECIPE, START
from tests.support.hermetic import no_leaks
from tests.support.split_graphs import SplitStep, with_split_step

MOST, FEW = 8, 4
MESH = ("--world-size", "128", "--strategy.mesh", "{dp_shard: 16, tp: 8}", "--model.init_args.overrides")
STARTS = {"one by one": START, "buckets": (*START, *BUCKETS)}
Runs = dict[str, int]


@pytest.fixture(scope="module")
def orders(tmp_path_factory) -> dict[str, tuple[Runs, ...]]:
    """Runs of the backward by reduction: before it is ordered, after, capped as usual, and with a lower cap."""
    found = {}

    def look(step: SplitStep) -> None:
        for name, passes in STARTS.items():
            copy, seen = step.copied(), []
            graph = copy.halves()["backward"].graph
            for names in (passes, ("schedule_overlap",), ("cap_compute_runs",)):
                copy.run(names)
                seen.append(_runs(graph))
            cap_compute_runs(graph, max_consecutive=FEW)
            found[name] = (*seen, _runs(graph))

    with no_leaks(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("plan"))
        with_split_step((*RECIPE, *MESH, "{n_layers: 2}"), look)
    return found


def _runs(graph: fx.Graph) -> Runs:
    """Heavy calls ahead of every reduction of a gradient, since the one before."""
    runs, length = {}, 0
    for node in graph.nodes:
        length += is_heavy(node)
        if fxn.collective_role(node) == fxn.TERMINAL_REDUCTION:
            runs[node.name], length = length, 0
    return runs


def _longer(after: Runs, before: Runs, most: int) -> Runs:
    """Runs of more than ``most`` that had fewer before."""
    assert before.keys() == after.keys() and len(before) > 4
    return {reduction: run for reduction, run in after.items() if run > max(most, before[reduction])}


@pytest.mark.parametrize("name", STARTS)
def test_no_run_is_long_that_was_short(orders, name: str):
    before, _, after, _ = orders[name]
    assert _longer(after, before, MOST) == {}


def test_a_lower_cap_cuts_what_the_new_order_made_longer(orders):
    """Eight is more than any run of two layers has that it did not have before; four is not."""
    before, ordered, _, after = orders["one by one"]
    assert _longer(ordered, before, FEW)
    assert _longer(after, before, FEW) == {}
