"""The recipes that come with the package: all parse, and all plan on the ranks that their first lines name."""

from __future__ import annotations

import json
import re
import sys

import pytest
import yaml

from lightning_autoparallel.cli.main import main
from lightning_autoparallel.cli.recipes import recipe_folder, recipe_names
from tests.support.plans import by_rules, rules_of

RECIPES = [name for name in recipe_names(recipe_folder()) if name.startswith("llama3/")]
SIZED = [name for name in RECIPES if name != "llama3/debug"]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-autoparallel"])


def text_of(name):
    return (recipe_folder() / f"{name}.yaml").read_text()


def usual_ranks(name):
    found = re.search(rf"plan --config {name} --world-size (\d+)", text_of(name))
    return int(found[1]) if found else 4


def planned(folder, name, ranks, *args, rules=False):
    recipe = by_rules(name) if rules else ["--config", name]
    assert main(["plan", *recipe, "--world-size", str(ranks), "--output", "r.json", *args]) == 0
    return json.loads((folder / "r.json").read_text())


def test_all_sizes_are_there():
    assert {f"llama3/{size}" for size in ("debug", "1b", "8b", "70b", "405b")} <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_parses(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", name, "--print_config"])
    assert exit_.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["strategy"]["plan"] == "auto"


@pytest.mark.parametrize("name", RECIPES)
def test_rules_lie_over_every_recipe(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["fit", *by_rules(name), "--print_config"])
    assert exit_.value.code == 0
    plan = yaml.safe_load(capsys.readouterr().out)["strategy"]["plan"]
    assert plan == {"base": "fsdp", "rules": rules_of(name)}
    assert plan["rules"]["*.attention.wo.weight"] == {"tp": "S(1)"}


@pytest.mark.parametrize("name", SIZED)
def test_the_launch_command_starts_as_many_ranks_as_are_planned(name):
    text = text_of(name)
    trainer = yaml.safe_load(text)["trainer"]
    nodes = re.search(r"torchrun --nnodes (\d+)", text)
    assert trainer["num_nodes"] == (int(nodes[1]) if nodes else 1)
    assert f"--nproc-per-node {trainer['devices']}" in text
    assert trainer["devices"] * trainer["num_nodes"] == usual_ranks(name)


@pytest.mark.parametrize("name", SIZED)
def test_one_layer_of_every_recipe_plans_on_its_ranks(name, tmp_path, capsys):
    report = planned(tmp_path, name, usual_ranks(name), "--model.init_args.overrides", "{n_layers: 1}")
    assert report["optimizer_bytes"] == 2 * report["parameters_bytes"]
    wo = report["parameters"]["model.layers.0.attention.wo.weight"]
    assert wo["placements"]["dp_shard"] == "S(0)"
    assert wo["parameter_bytes"] * usual_ranks(name) == 4 * wo["shape"][0] * wo["shape"][1]


@pytest.mark.parametrize(("name", "tp"), [("llama3/8b", 8), ("llama3/1b", 4)])
def test_no_rank_ever_holds_the_whole_vocabulary(name, tp, tmp_path, capsys):
    mesh = ["--strategy.mesh", f"{{dp_shard: 16, tp: {tp}}}"]
    options = ["--model.init_args.overrides", "{n_layers: 1}", "--dump", "graphs"]
    report = planned(tmp_path, name, 16 * tp, *mesh, *options, rules=True)
    vocabulary = report["parameters"]["model.tok_embeddings.weight"]["shape"][0]
    for graph in ("forward", "backward"):
        text = (tmp_path / f"graphs/training_step/{graph}.py.txt").read_text()
        dims = {int(dim) for shape in re.findall(r'"\w+\[([\d, ]+)\]', text) for dim in shape.split(",")}
        assert vocabulary not in dims
        assert vocabulary // tp in dims


@pytest.mark.matrix
@pytest.mark.timeout(900)  # 2 to 3 minutes where nothing else runs
@pytest.mark.parametrize("rules", [True, False])
@pytest.mark.parametrize("name", SIZED)
def test_every_recipe_plans_whole(name, rules, tmp_path, capsys):
    notes = planned(tmp_path, name, usual_ranks(name), rules=rules)["notes"]
    assert [note for note in notes if rules or not note.startswith("plan auto")] == []
