"""The 8B recipe by rules, on sixteen by eight ranks, two layers of it: a block's collectives are those written by hand.

With the recipe's checkpointing the backward gathers the norms' results over tp once more, as Korthikanti et al. 2022
("Reducing activation recomputation in large transformer models", section 4.2.2) do; no reduction is repeated.
"""

from __future__ import annotations

import re
import sys

import pytest

from lightning_autoparallel.cli import plan as plan_command
from lightning_autoparallel.cli.main import main
from lightning_autoparallel.contracts import PlanReport
from tests.support.hermetic import no_leaks
from tests.support.plans import by_rules

# Launches are attributed to the modules that asked for them before they are merged.
ONE_BY_ONE = ("--strategy.disabled_passes", '["bucket_collectives"]', "--strategy.decompose_matmuls", "never")
ATTENTION, FEED_FORWARD = ("attention_norm", "attention"), ("ffn_norm", "feed_forward")


def planned(tmp_path_factory, *options: str) -> PlanReport:
    """What `plan` says of the recipe."""
    kept: list[PlanReport] = []
    # A fixture of the module's runs outside of what watches each test: the recipe's seed must not stay behind.
    with no_leaks(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("plan"))
        patch.setattr(sys, "argv", ["lightning-autoparallel"])
        patch.setattr(plan_command, "print_report", lambda report, seconds: kept.append(report))
        arguments = [*by_rules("llama3/8b"), "--world-size", "128", "--strategy.mesh", "{dp_shard: 16, tp: 8}"]
        assert main(["plan", *arguments, "--model.init_args.overrides", "{n_layers: 2}", *options]) == 0
    return kept[0]


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> PlanReport:
    return planned(tmp_path_factory, "--strategy.activation_checkpointing", "none", *ONE_BY_ONE)


@pytest.fixture(scope="module")
def selective(tmp_path_factory) -> PlanReport:
    return planned(tmp_path_factory, *ONE_BY_ONE)


@pytest.fixture(scope="module")
def merged(tmp_path_factory) -> PlanReport:
    return planned(tmp_path_factory)


def launches(report: PlanReport, graph: str, *modules: str) -> dict[tuple[str, str], int]:
    """(kind, axes) -> launches of the code of these modules and what is below them."""
    found: dict[tuple[str, str], int] = {}
    for module in report.modules:
        if not any(re.fullmatch(rf"{re.escape(name)}(\..*)?", module.path) for name in modules):
            continue
        for kind, per_axes in module.collectives.get(graph, {}).items():
            for axes, counted in per_axes.items():
                found[kind, axes] = found.get((kind, axes), 0) + counted.count
    return found


@pytest.mark.parametrize("graph", ["forward", "backward"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("half", [ATTENTION, FEED_FORWARD], ids=["attention", "feed_forward"])
def test_half_a_block_gathers_once_and_scatters_once(report: PlanReport, graph: str, layer: int, half):
    counts = launches(report, graph, *(f"model.layers.{layer}.{name}" for name in half))
    assert counts.get(("all_gather", "tp"), 0) <= 1
    assert counts.get(("reduce_scatter", "tp"), 0) <= 1
    assert not {kind for kind, axes in counts if axes == "tp"} - {"all_gather", "reduce_scatter", "all_reduce"}
    # The norm's weight is whole on every rank of tp, its gradient a sum over their parts of the sequence.
    assert counts.get(("all_reduce", "tp"), 0) == (1 if graph == "backward" else 0)


@pytest.mark.parametrize("graph", ["forward", "backward"])
def test_all_blocks_together_gather_and_scatter_as_often(report: PlanReport, graph: str):
    """Two halves of two blocks, and the embedding or the output: no collective hides outside of the blocks' modules."""
    table = report.collectives[graph]
    assert table["all_gather"]["tp"].count == table["reduce_scatter"]["tp"].count == 5
    assert "all_to_all" not in table and "broadcast" not in table


def test_parameters_are_gathered_and_reduced_over_dp_shard_only(report: PlanReport):
    matrices_and_norms = 9
    for layer in (0, 1):
        path = f"model.layers.{layer}"
        assert launches(report, "forward", path)["all_gather", "dp_shard"] == matrices_and_norms
        assert launches(report, "backward", path)["all_gather", "dp_shard"] == matrices_and_norms
        assert launches(report, "backward", path)["reduce_scatter", "dp_shard"] == matrices_and_norms
    assert {axes for table in report.collectives.values() for per in table.values() for axes in per} == {
        "dp_shard",
        "tp",
    }


def test_each_block_gathers_its_parameters_at_once_and_reduces_their_gradients_so(merged: PlanReport):
    """Before and behind the two blocks the embedding and the output; gradients in float32 take two launches a block."""
    forward, backward = merged.collectives["forward"], merged.collectives["backward"]
    assert forward["all_gather"]["dp_shard"].count <= 2 + 2
    assert backward["all_gather"]["dp_shard"].count <= 2 + 2
    assert backward["reduce_scatter"]["dp_shard"].count <= 2 * 2 + 2


def test_checkpointing_repeats_gathers_over_tp_and_no_reduction(report: PlanReport, selective: PlanReport):
    assert selective.collectives["forward"] == report.collectives["forward"]
    repeated, plain = selective.collectives["backward"], report.collectives["backward"]
    halves_of_blocks = 4
    assert repeated["all_gather"]["tp"].count == plain["all_gather"]["tp"].count + halves_of_blocks
    assert {kind: per for kind, per in repeated.items() if kind != "all_gather"} == {
        kind: per for kind, per in plain.items() if kind != "all_gather"
    }
    assert selective.saved_bytes < 0.7 * report.saved_bytes
