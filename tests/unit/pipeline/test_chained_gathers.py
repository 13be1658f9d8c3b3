"""A plan whose backward wants weights whole that the forward has in parts: each is still gathered once."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_autoparallel.contracts import CompiledStep
from tests.numerics.chained_gathers import SMALL, build_stored, chains_in, llama_request, write_plan
from tests.support.hermetic import no_leaks

PASS = "fuse_chained_all_gathers"
LAYERS = 2


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> tuple[CompiledStep, CompiledStep]:
    """The step without the pass and with it, before other passes merge gathers."""
    path: Path = tmp_path_factory.mktemp("plan") / "plan.json"
    with no_leaks():
        request = llama_request("debug", 64, {"n_layers": LAYERS, **SMALL})
        write_plan(request, path)
        merged = "bucket_collectives"
        return build_stored(request, path, PASS, merged), build_stored(request, path, merged)


def gathers(step: CompiledStep, half: str) -> dict[str, int]:
    return {axes: counted.count for axes, counted in step.report.collectives[half]["all_gather"].items()}


def test_no_chain_is_left(steps: tuple[CompiledStep, CompiledStep]):
    without, fused = steps
    assert chains_in(without.partitioned.backward.graph) == 2 * LAYERS
    assert chains_in(fused.partitioned.backward.graph) == 0
    assert chains_in(fused.partitioned.forward.graph) == chains_in(without.partitioned.forward.graph) == 0


def test_a_chain_became_one_gather_over_both_axes(steps: tuple[CompiledStep, CompiledStep]):
    without, fused = steps
    assert gathers(fused, "forward") == gathers(without, "forward")
    before, after = gathers(without, "backward"), gathers(fused, "backward")
    chains = 2 * LAYERS
    assert after == before | {
        "dp_shard": before["dp_shard"] - chains,
        "tp": before["tp"] - chains,
        "tp,dp_shard": chains,
    }


def test_the_report_says_so(steps: tuple[CompiledStep, CompiledStep]):
    done = {report.graph: report for report in steps[1].report.passes if report.name == PASS}
    assert done["step.forward"].notes == ()
    assert done["step.backward"].notes == (f"{2 * LAYERS} chains fused, {2 * LAYERS} gathers less",)
    assert done["step.backward"].after["all_gather"]["tp,dp_shard"].count == 2 * LAYERS
