"""The subcommand `plan`: what it prints, writes, refuses, and never starts."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lightning_autoparallel.cli.main import main
from lightning_autoparallel.models import Llama3Module
from lightning_autoparallel.plan import read_plan

RECIPE = {
    "strategy": {"mesh": {"dp_shard": -1}, "plan": "fsdp"},
    "model": {"class_path": "lightning_autoparallel.models.Llama3Module", "init_args": {"size": "debug"}},
    "data": {
        "class_path": "lightning_autoparallel.models.TextDataModule",
        "init_args": {"seq_len": 32, "batch_size": 2, "max_bytes": 100_000},
    },
}
KEYS = {"mesh", "timings_s", "forward", "backward", "parameters_bytes", "gradients_bytes", "optimizer_bytes"}


class NeverMade(Callback):
    """Fails where it is made."""

    def __init__(self) -> None:
        raise AssertionError("planning makes no callbacks")


class NeverLogs(CSVLogger):
    """Fails where it is made."""

    def __init__(self) -> None:
        raise AssertionError("planning makes no loggers")


class ReadsItsWeights(Llama3Module):
    """Cannot be built without values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(3).sum().item()


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-autoparallel"])


def plan(folder, *args, **sections):
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **sections}))
    return main(["plan", "--config", str(folder / "recipe.yaml"), *args])


def shown(capsys):
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_collectives_memory_and_time_are_printed(tmp_path, capsys):
    assert plan(tmp_path, "--world-size", "16") == 0
    lines = shown(capsys)
    assert lines[0] == "training_step on mesh {dp_shard: 16}, plan fsdp"
    assert "forward all_gather dp_shard 1 1.7 MiB" in lines
    assert any(line.startswith("bucket_collectives training_step.forward all_gather 21 -> 1 ") for line in lines)
    assert any(line.startswith(".attention.wq weight {dp_shard: S(0)} 2 8.0 KiB 8.0 KiB 16.0 KiB ") for line in lines)
    assert [part.split()[0] for part in lines[-1].split(", ")] == [
        "capture",
        "plan",
        "apply",
        "passes",
        "predict",
        "peak",
    ]
    # what is predicted says so, and for what
    assert "Time and memory of one step on one rank (predicted for h100)" in lines
    assert any(line.startswith("predicted step (forward and backward): ") for line in lines)
    assert any(line.startswith("predicted throughput per second and device: ") for line in lines)
    assert any(line.startswith("prefetch_gathers training_step.forward ") for line in lines)
    assert any(line.startswith("schedule_overlap training_step.backward ") for line in lines)
    assert not dist.is_initialized()


def test_the_report_is_written(tmp_path, capsys):
    assert plan(tmp_path, "--world-size", "16", "--output", "reports/r.json", "--inference") == 0
    report = json.loads((tmp_path / "reports/r.json").read_text())
    assert report.keys() > KEYS | {"inference"}
    assert report["mesh"] == {"dp_shard": 16}
    assert report["timings_s"].keys() == {"capture", "plan", "apply", "passes", "predict"}
    assert report["forward"]["collectives"]["all_gather"]["dp_shard"] == {"count": 1, "bytes": 1739264}
    assert report["inference"]["collectives"]["all_gather"]["dp_shard"]["count"] == 1
    assert report["forward"]["saved_bytes"] > report["inference"]["saved_bytes"] == 0
    assert report["optimizer_bytes"] == 2 * report["parameters_bytes"] == 2 * report["gradients_bytes"]
    assert report["parameters_bytes"] == 1739264 // 16
    for name in ("forward", "backward", "inference"):
        graph = report[name]
        assert graph["time_us"] == pytest.approx(graph["compute_us"] + graph["exposed_us"])
        assert graph["communication_us"] > graph["exposed_us"] > 0
        sizes = [share["size_bytes"] for share in graph["largest_at_peak"]]
        assert len(sizes) == 5 and sizes == sorted(sizes, reverse=True)
        assert sizes[0] < sum(sizes) <= graph["peak_memory_bytes"] <= report["predicted_peak_bytes"]
    step_s = (report["forward"]["time_us"] + report["backward"]["time_us"]) / 1e6
    assert report["tokens_per_second_per_device"] == pytest.approx(2 * 32 / step_s)
    assert {done["graph"].rpartition(".")[2] for done in report["passes"]} >= {"forward", "backward", "inference"}


def test_hardware_changes_times_and_nothing_else(tmp_path, capsys):
    files = ("a.json", "b.json")
    # The pass that decides by times is off.
    common = ("--world-size", "16", "--strategy.disabled_passes", "[schedule_overlap]")
    assert plan(tmp_path, *common, "--output", files[0], "--hardware", "b200", "--trace", "t.json") == 0
    measured = "{base: b200, memory_gb_per_s: 800.0, kernel_latency_us: 9.0}"
    assert plan(tmp_path, *common, "--output", files[1], "--hardware", measured) == 0
    fast, slow = (json.loads((tmp_path / file).read_text()) for file in files)
    assert (fast["hardware"]["name"], slow["hardware"]["name"]) == ("b200", "b200 with other rates")
    assert slow["hardware"]["memory_gb_per_s"] == 800.0
    for graph in ("forward", "backward"):
        assert slow[graph]["compute_us"] > fast[graph]["compute_us"]
        assert slow[graph]["communication_us"] == fast[graph]["communication_us"]
        assert slow[graph]["collectives"] == fast[graph]["collectives"]
        assert slow[graph]["peak_memory_bytes"] == fast[graph]["peak_memory_bytes"]
    calls = [event for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if event["ph"] == "X"]
    ends = [event["ts"] + event["dur"] for event in calls]
    assert max(ends) == pytest.approx(fast["step_time_us"])


def test_graphs_are_dumped_where_asked(tmp_path, capsys):
    assert plan(tmp_path, "--world-size", "2", "--dump", "graphs") == 0
    assert "all_gather_into_tensor" in (tmp_path / "graphs/training_step/forward.py.txt").read_text()


def test_a_plan_is_found_explained_and_written(tmp_path, capsys):
    options = ["--strategy.plan", "auto", "--strategy.mesh", "{dp_shard: 2, tp: 2}"]
    asked = ["--dump", "found", "--output", "report.json", "--html", "report.html", "--explain", "*.attention.wk"]
    assert plan(tmp_path, "--world-size", "4", *options, *asked) == 0
    lines = shown(capsys)
    assert any(line.startswith("note: plan auto on tp: ") for line in lines)
    start = next(i for i, line in enumerate(lines) if line.startswith("Why what '*.attention.wk' matches"))
    assert lines[start + 1].startswith("model.layers.*.attention.wk aten.")
    assert any(re.search(r" us more, (as many bytes|.* (less|more)) kept$", line) for line in lines[start + 2 :])

    told = json.loads((tmp_path / "report.json").read_text())["explanation"]
    assert told["pattern"] == "*.attention.wk" and told["choices"][0]["what"].startswith("model.layers.*.attention.wk")
    assert "Why it is placed so" in (tmp_path / "report.html").read_text()
    document = read_plan(tmp_path / "found/training_step/plan.json")
    assert (document["base"], document["mesh"]) == ("fsdp", {"dp_shard": 2, "tp": 2})
    assert document["rules"]["*"] == {"tp": "R"}
    file = str(tmp_path / "found/training_step/plan.json")
    assert plan(tmp_path, "--world-size", "4", "--strategy.plan", file, *options[2:4]) == 0


def test_a_page_is_written(tmp_path, capsys):
    assert plan(tmp_path, "--world-size", "4", "--strategy.plan", "auto", "--html", "pages/plan.html") == 0
    page = (tmp_path / "pages" / "plan.html").read_text()
    assert "training_step, plan auto" in page
    assert "model.layers.*" in page
    assert "exposed: all_gather" in page
    assert len(page) < 200_000


def test_two_plans_are_compared_and_a_report_of_another_model_is_refused(tmp_path, capsys):
    assert plan(tmp_path, "--world-size", "4", "--output", "fsdp.json") == 0
    capsys.readouterr()
    assert plan(tmp_path, "--world-size", "4", "--strategy.plan", "ddp", "--compare", "fsdp.json") == 0
    lines = shown(capsys)
    assert "model.layers.*.attention.wq.weight {dp_shard: R} [128, 128] {dp_shard: S(0)} [32, 128] 2" in lines
    assert "parameters 1.7 MiB 424.6 KiB +1.2 MiB" in lines
    assert any(line.startswith("exposed communication ") for line in lines)

    report = json.loads((tmp_path / "fsdp.json").read_text())
    report["parameters"]["model.norm.weight"]["shape"] = [7]
    (tmp_path / "r.json").write_text(json.dumps(report))
    assert plan(tmp_path, "--world-size", "4", "--compare", "r.json") == 1
    assert "--compare r.json is a report of another model: model.norm.weight has shape" in capsys.readouterr().err


def test_a_named_plan_is_explained(tmp_path, capsys):
    assert plan(tmp_path, "--world-size", "4", "--explain", "model.*norm.weight") == 0
    lines = shown(capsys)
    assert "model.norm.weight: kept {dp_shard: S(0)}; dp_shard: base plan 'fsdp'" in lines
    assert "model.layers.*.ffn_norm.weight (2 alike): kept {dp_shard: S(0)}; dp_shard: base plan 'fsdp'" in lines


def test_the_trainer_of_the_recipe_is_replaced(tmp_path, capsys):
    trainer = {
        "accelerator": "gpu",
        "devices": 8,
        "num_nodes": 64,
        "precision": "bf16-mixed",
        "callbacks": [{"class_path": f"{__name__}.NeverMade"}],
        "logger": {"class_path": f"{__name__}.NeverLogs"},
    }
    assert plan(tmp_path, "--world-size", "8", "--output", "r.json", trainer=trainer) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"recipe.yaml", "r.json"}
    gathered = json.loads((tmp_path / "r.json").read_text())["forward"]["collectives"]["all_gather"]["dp_shard"]
    assert gathered["bytes"] < 1739264  # the precision is the recipe's


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--world-size", "8", "--strategy.mesh", "{dp_shard: 3}"], "mesh {dp_shard: 3} needs 3 ranks"),
        (["--world-size", "8", "--output", "."], "--output . is a folder"),
        (["--world-size", "8", "--trace", "."], "--trace . is a folder"),
        (["--world-size", "8", "--html", "."], "--html . is a folder"),
        (["--world-size", "8", "--explain", "*.wx"], "'*.wx' matches no parameter, no module and no call"),
        (["--world-size", "8", "--compare", "none.json"], "--compare none.json cannot be read"),
        (["--world-size", "8", "--hardware", "h10"], "did you mean 'h100'"),
        (["--world-size", "8", "--data.init_args.batch_size", "100000"], "batch_size=100000"),
        (["--world-size", "8", "--strategy.plan", '{"*.nope": {"tp": "R"}}'], "nope"),
    ],
)
def test_what_cannot_be_planned_is_one_message_and_status_1(tmp_path, capsys, args, message):
    assert plan(tmp_path, *args) == 1
    assert message in capsys.readouterr().err
    assert not dist.is_initialized()


def test_a_model_that_reads_values_is_refused(tmp_path, capsys):
    assert plan(tmp_path, "--world-size", "8", model={"class_path": f"{__name__}.ReadsItsWeights"}) == 1
    assert "ReadsItsWeights cannot run on the meta device" in capsys.readouterr().err


def test_the_world_size_is_asked_for(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        plan(tmp_path)
    assert exit_.value.code == 2
    assert "--world-size 64" in capsys.readouterr().err


def test_meshes_are_ranked_and_written(tmp_path, capsys):
    options = ["--strategy.mesh", "auto", "--strategy.plan", "auto", "--global-batch-size", "16", "--output", "r.json"]
    assert plan(tmp_path, "--world-size", "4", "--ranks-per-node", "4", *options) == 0
    lines = shown(capsys)
    title = lines.index("Meshes, by predicted time per sample")
    report = json.loads((tmp_path / "r.json").read_text())
    trials = report["meshes"]
    assert [trial["samples"] * trial["accumulation"] for trial in trials] == [16] * 4
    by_nodes = ["dp_shard 4", "dp_shard 2, tp 2", "tp 4"]
    tried = [", ".join(f"{axis} {size}" for axis, size in trial["mesh"].items()) for trial in trials]
    assert sorted(tried) == sorted([*by_nodes, "dp_replicate 2, dp_shard 2"]), "the best has four ranks on dp_shard"
    named = [", ".join(f"{axis}: {size}" for axis, size in trial["mesh"].items()) for trial in trials]
    shown_below = lines[title + 1 : title + 10]
    places = [next(i for i, line in enumerate(shown_below) if line.startswith(name)) for name in named]
    assert places == sorted(places)
    assert report["mesh"] == trials[0]["mesh"]
