"""What ``plan`` predicts of the large recipes with products decomposed and without, inside of a node and across two."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_autoparallel.cli.main import main
from tests.support.plans import by_rules

# Over two nodes a transfer crosses the slower link, which a ring of all adapters does not.
CASES = [("llama3/8b", 8), ("llama3/8b", 16), ("llama3/70b", 8), ("llama3/70b", 16)]
PASSES = ("decompose_gather_matmul", "decompose_matmul_scatter")


def _planned(recipe: str, ranks: int, when: str, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    mesh = ("--world-size", str(ranks), "--ranks-per-node", "8", "--strategy.mesh", f"{{dp_shard: -1, tp: {ranks}}}")
    layers = ("--model.init_args.overrides", "{n_layers: 2}")
    patch.setattr(sys, "argv", ["lightning-autoparallel"])
    options = ("--output", "report.json", "--strategy.decompose_matmuls", when)
    assert main(["plan", *by_rules(recipe), *mesh, *layers, *options]) == 0
    report: dict[str, Any] = json.loads(Path("report.json").read_text())
    return report


def _check(recipe: str, ranks: int, patch: pytest.MonkeyPatch, printed: pytest.CaptureFixture[str]) -> dict[str, Any]:
    whole = _planned(recipe, ranks, "never", patch)
    printed.readouterr()
    parts = _planned(recipe, ranks, "auto", patch)
    text = printed.readouterr().out
    for half in ("forward", "backward"):
        decomposed = "permute" in parts[half]["collectives"]
        assert "permute" not in whole[half]["collectives"]
        before, after = whole[half]["time_us"], parts[half]["time_us"]
        assert after < before if decomposed else after == pytest.approx(before, rel=1e-9), half
        assert (parts[half]["exposed_us"] < whole[half]["exposed_us"]) == decomposed
    notes = [note for done in parts["passes"] if done["name"] in PASSES for note in done["notes"]]
    # Every candidate has its verdict, and the exposed times are those of the whole graph.
    assert notes and all(f": {note}" in text for note in notes)
    assert not any(note for done in whole["passes"] if done["name"] in PASSES for note in done["notes"])
    if any("permute" in parts[half]["collectives"] for half in ("forward", "backward")):
        assert parts["step_time_us"] < whole["step_time_us"]
        assert any(note.startswith("predicted with ") and "exposed" in note for note in notes)
    return parts


def test_8b_in_a_node_is_decomposed_and_gets_faster(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    parts = _check("llama3/8b", 8, monkeypatch, capsys)
    assert "permute" in parts["forward"]["collectives"]


@pytest.mark.matrix
@pytest.mark.parametrize(("recipe", "ranks"), CASES)
def test_what_the_gate_decomposes_gets_faster(recipe: str, ranks: int, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    _check(recipe, ranks, monkeypatch, capsys)
