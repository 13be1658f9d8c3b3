"""The subcommand `bench`: who is measured when, what the figures say, and one real comparison of two processes."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_autoparallel.artifacts import to_json
from lightning_autoparallel.cli.bench import command
from lightning_autoparallel.cli.bench.bench_options import bench_options, plain_config
from lightning_autoparallel.cli.bench.contenders import (
    WITHOUT_ALL,
    baselines,
    ours,
    parse_against,
    schedule,
    with_plans,
    without_passes,
)
from lightning_autoparallel.cli.bench.measurements import Contender, Job, Measurement, RankResult, Runs, combine
from lightning_autoparallel.cli.bench.processes import MeasurementError, environment, failure, run_ranks
from lightning_autoparallel.cli.bench.rank import timed_only
from lightning_autoparallel.cli.bench.rows import RowSplit
from lightning_autoparallel.cli.bench.table import as_json, make_rows, predicted_lines, problems, ratio
from lightning_autoparallel.cli.bench.wrap import blocks, parts, policy
from lightning_autoparallel.cli.main import main
from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.errors import AutoParallelError, ConfigError
from lightning_autoparallel.passes import all_passes

CONFIG = {
    "against": "ddp",
    "passes": False,
    "plans": "",
    "processes": None,
    "steps": 4,
    "warmup": 1,
    "rounds": 2,
    "threads": None,
    "limit_s": 60.0,
    "output": None,
    "seed_everything": 7,
    "trainer": {"devices": 2, "logger": {"class_path": "CSVLogger"}, "callbacks": [{}], "profiler": "simple"},
    "model": {"class_path": "Model"},
    "data": None,
    "strategy": {"mesh": {"dp_shard": -1}, "disabled_passes": None},
}
MEASURED = Measurement(step_ms=10.0, launches=8, peak_bytes=2048, startup_s=3.0, compile_s=None, losses=[4.0, 2.0])


def test_predictions_stand_beside_what_was_measured():
    known = replace(MEASURED, predicted_ms=8.0)
    lines = predicted_lines([runs(known, known, name="autoparallel"), runs(MEASURED)])
    assert lines == ["autoparallel: 10.0 ms measured, 8.0 predicted: 1.25 x"]


def runs(*measured: Measurement, name: str = "ddp", errors: tuple[str, ...] = ()) -> Runs:
    return Runs(contender=Contender(name=name), measured=measured, errors=errors)


# -- who is measured, and when ---------------------------------------------------------------------------------------


def test_contenders_take_turns():
    contenders = [ours(), *parse_against("fsdp2, ddp,")]
    order = [(turn, contender.name) for turn, contender in schedule(contenders, 2)]
    assert order == [
        *((1, name) for name in ("autoparallel", "fsdp2", "ddp")),
        *((2, name) for name in ("fsdp2", "ddp", "autoparallel")),
    ]


@pytest.mark.parametrize(
    ("policy", "against", "lines"),
    [("selective", "ddp", 2), ("selective", "", 0), ("none", "ddp", 0), ("auto", "ddp", 0)],
)
def test_it_is_said_that_only_this_strategy_recomputes(policy, against, lines):
    assert len(command.recomputing_lines(policy, [ours(), *parse_against(against)])) == lines


def test_every_baseline_can_be_named():
    assert [contender.kind for contender in parse_against(",".join(baselines()))] == ["ddp", "fsdp2"] * 2


def test_each_pass_that_is_on_is_switched_off_in_turn_and_all_at_once():
    off = without_passes(["a", "b", "c"], ["b"])
    assert [(one.name, one.overrides["disabled_passes"]) for one in off] == [
        ("without a", ["b", "a"]),
        ("without c", ["b", "c"]),
        (WITHOUT_ALL, ["a", "b", "c"]),
    ]


def test_plans_are_contenders_of_this_strategy():
    plans = with_plans("auto, ddp,auto")
    assert [(one.name, one.kind, one.overrides) for one in plans] == [
        ("plan auto", "autoparallel", {"plan": "auto"}),
        ("plan ddp", "autoparallel", {"plan": "ddp"}),
    ]
    names = [contender.name for contender in bench_options(CONFIG | {"against": "ddp", "plans": "fsdp"}).contenders]
    assert names == ["autoparallel", "plan fsdp", "ddp"]
    with pytest.raises(ConfigError, match=r"--plans names .dpp.*ddp"):
        with_plans("dpp")


def test_passes_are_those_of_the_package():
    options = bench_options(CONFIG | {"against": "", "passes": True})
    names = [f"without {graph_pass.name}" for graph_pass in all_passes()]
    assert [contender.name for contender in options.contenders] == ["autoparallel", *names, WITHOUT_ALL]


# -- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"against": "ddp,fsdp"}, "did you mean 'fsdp2'"),
        ({"against": "horovod"}, "names are ddp, fsdp2"),
        ({"against": ""}, "--against ddp,fsdp2, --plans auto,ddp or --passes"),
        ({"steps": 0}, "--steps 0"),
        ({"rounds": 0}, "--rounds 0"),
        ({"warmup": 0}, "the first step compiles"),
        ({"processes": 0}, "--processes 0"),
        ({"trainer": {"devices": "auto"}}, "give --processes N"),
        ({"strategy": {"mesh": {"dp_shard": 2, "tp": 2}, "disabled_passes": None}}, "needs 4 processes"),
        ({"output": "."}, "is a folder"),
    ],
)
def test_wrong_arguments(changed, message):
    with pytest.raises(ConfigError, match=message):
        bench_options(CONFIG | changed)


@pytest.mark.parametrize(
    ("changed", "processes"),
    [({}, 2), ({"processes": 4}, 4), ({"trainer": {"devices": [0, 3, 5]}}, 3), ({"trainer": {"devices": "8"}}, 8)],
)
def test_processes_are_the_devices_of_the_config_unless_given(changed, processes):
    assert bench_options(CONFIG | changed).processes == processes


def test_a_wrong_argument_ends_with_status_2(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-autoparallel"])
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--config", "llama3/debug", "--against", "fsdp"])
    assert exit_.value.code == 2
    assert "did you mean 'fsdp2'" in capsys.readouterr().err


def test_ranks_read_the_config_without_what_keeps_or_shows_something():
    plain = plain_config(CONFIG)
    assert plain["trainer"] == {"devices": 2, "logger": False, "callbacks": None, "profiler": None}
    assert plain.keys() == {"seed_everything", "trainer", "model", "strategy"}
    assert plain["seed_everything"] == 7
    assert plain_config(CONFIG | {"seed_everything": False})["seed_everything"] == 0


def test_the_end_of_training_is_only_ever_put_off():
    job = Job(config={}, contender=ours(), processes=2, warmup=2, steps=5)
    given = {"plugins": None, "max_steps": 200}
    assert timed_only(given, job)["max_steps"] == 200
    assert timed_only(given | {"max_steps": 3}, job)["max_steps"] == 8
    assert "max_epochs" not in timed_only(given | {"max_steps": -1}, job)


# -- processes -------------------------------------------------------------------------------------------------------


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_one_rank_that_fails_ends_the_others(tmp_path):
    code = "import os, time; print('seen'); time.sleep(0 if os.environ['RANK'] == '1' else 60); raise SystemExit(3)"
    codes = run_ranks(python(code), tmp_path, processes=2, threads=1, limit_s=30)
    assert codes == [None, 3]
    assert failure(tmp_path, codes) == "rank 1 ended with status 3: seen"


def test_ranks_that_take_too_long_are_ended(tmp_path):
    codes = run_ranks(python("import time; time.sleep(60)"), tmp_path, processes=1, threads=1, limit_s=0.5)
    assert (codes, failure(tmp_path, codes)) == ([None], "took too long and was ended")


def test_a_rank_that_was_killed_says_by_what(tmp_path):
    codes = run_ranks(python("import os; os.kill(os.getpid(), 9)"), tmp_path, processes=1, threads=1, limit_s=30)
    assert failure(tmp_path, codes) == "rank 0 was killed by SIGKILL: it printed nothing"


def test_the_first_error_is_the_cause(tmp_path):
    (tmp_path / "rank1.error").write_text("ValueError: cause")
    (tmp_path / "rank0.error").write_text("RuntimeError: peer is gone")
    os.utime(tmp_path / "rank1.error", ns=(1, 1))
    assert failure(tmp_path, [1, 1]) == "ValueError: cause"


def test_what_a_launcher_set_does_not_reach_the_ranks(tmp_path):
    inherited = {"SLURM_NTASKS": "8", "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4", "HOME": "/", "RANK": "3"}
    made = environment(inherited, tmp_path, processes=2, threads=3)
    assert made.keys() & inherited.keys() == {"HOME"}
    assert (made["WORLD_SIZE"], made["OMP_NUM_THREADS"]) == ("2", "3")


# -- figures ---------------------------------------------------------------------------------------------------------


def rank_result(**changed) -> RankResult:
    values = {"step_ms": [1.0, 9.0, 2.0, 8.0, 7.0], "launches": [1, 3, 1, 3, 1], "losses": [4.0, 2.0]}
    values |= {"peak_bytes": 10, "memory_label": "m", "startup_s": 1.0, "compile_s": 0.5, "accumulated": 1}
    values |= {"planned_launches": 2}
    return RankResult(**{**values, "device": "cpu", "backend": "gloo", **changed})


def test_ranks_are_put_together():
    other = rank_result(step_ms=[100.0] * 5, peak_bytes=30, startup_s=2.0, losses=[2.0, 1.0])
    whole = combine([rank_result(), other])
    assert (whole.step_ms, whole.launches, whole.peak_bytes, whole.startup_s) == (7.0, 1, 30, 2.0)
    assert whole.losses == [3.0, 1.5]


def test_accumulated_batches_are_one_window():
    whole = combine([rank_result(accumulated=2)])
    assert (whole.step_ms, whole.launches) == (5.0, 2.0)


def test_medians_ranges_and_ratios():
    reference = runs(*(replace(MEASURED, step_ms=time) for time in (10.0, 30.0, 20.0)), name="autoparallel")
    theirs = runs(replace(MEASURED, step_ms=40.0, launches=2, compile_s=1.5, losses=[4.0004, 2.0]))
    assert make_rows([reference, theirs], reference) == [
        ["autoparallel", "20.0", "10.0..30.0", "1.00", "8", "1.00", "2.0 KiB", "1.00", "3.0", "-", "0e+00"],
        ["ddp", "40.0", "40.0..40.0", "2.00", "2", "0.25", "2.0 KiB", "1.00", "3.0", "1.5", "1e-04"],
    ]
    assert as_json([theirs], reference)[0]["ratio_to_ours"] == {"step_ms": 2.0, "launches": 0.25, "peak_bytes": 1.0}
    assert problems([reference, theirs], reference) == []


@pytest.mark.parametrize("losses", [[4.0, 2.01], [math.nan, 2.0], []])
def test_other_maths_gets_no_ratio(losses):
    reference, theirs = runs(MEASURED, name="autoparallel"), runs(replace(MEASURED, losses=losses))
    assert ratio(theirs, reference, "step_ms") is None
    assert make_rows([theirs], reference)[0][-1] == "DIFFERENT"
    (line,) = problems([reference, theirs], reference)
    assert line.startswith("ddp did not compute what autoparallel did")
    (kept,) = json.loads(to_json({"contenders": as_json([theirs], reference)}))["contenders"]
    assert kept["measured"][0]["losses"] == [loss if math.isfinite(loss) else None for loss in losses]


def test_a_contender_that_failed_shows_its_error_line():
    reference, theirs = runs(MEASURED, name="autoparallel"), runs(errors=("ValueError: no\nmore of it",))
    assert make_rows([theirs], reference)[0][1:] == ["-"] * 9 + ["failed"]
    assert problems([reference, theirs], reference) == ["ddp failed: ValueError: no"]


class Parser:
    """Hands back what was parsed."""

    def dump(self, config, **_):
        return json.dumps(config)


def fake_measure(monkeypatch, failing: str) -> list[str]:
    measured: list[str] = []

    def measure(job, **_):
        measured.append(job.contender.name)
        if job.contender.name == failing:
            raise MeasurementError("ValueError: broken")
        return MEASURED

    monkeypatch.setattr(command, "measure", measure)
    return measured


def test_the_others_go_on_when_one_fails(monkeypatch, capsys, tmp_path):
    measured = fake_measure(monkeypatch, failing="ddp")
    output = tmp_path / "figures/result.json"
    command.run_bench(Parser(), CONFIG | {"against": "ddp,fsdp2", "output": str(output)})
    assert measured == ["autoparallel", "ddp", "fsdp2", "ddp", "fsdp2", "autoparallel"]
    shown = capsys.readouterr()
    assert "problem: ddp failed: ValueError: broken" in shown.out
    assert "round 2/2: fsdp2: 10.0 ms" in shown.err
    figures = json.loads(output.read_text())
    assert [len(one["measured"]) for one in figures["contenders"]] == [2, 0, 2]
    assert figures["measured_on"]["processes"] == 2


def test_only_our_own_failure_is_the_commands(monkeypatch, capsys):
    fake_measure(monkeypatch, failing="autoparallel")
    with pytest.raises(AutoParallelError, match=r"failed in 2 of 2 round\(s\): ValueError: broken"):
        command.run_bench(Parser(), CONFIG)
    assert "10.0..10.0" in capsys.readouterr().out


# -- the same batches for everyone -----------------------------------------------------------------------------------


def test_processes_that_share_a_batch_take_parts_of_its_rows():
    split = RowSplit.of(MeshSpec.from_mapping({"dp_replicate": 2, "dp_shard": 3, "tp": 2}))
    assert (split.shards, split.parts) == (6, 2)
    assert split.sampler(5) == {"num_replicas": 6, "rank": 2}
    batch = {"x": torch.arange(8).view(4, 2), "scale": torch.ones(3), "name": "n"}
    upper, lower = split.rows(batch, 4), split.rows(batch, 5)
    assert torch.cat([upper["x"], lower["x"]]).equal(batch["x"])
    assert (upper["scale"].equal(batch["scale"]), upper["name"]) == (True, "n")


def test_without_shared_batches_nothing_is_taken_apart():
    batch = [torch.ones(3)]
    assert RowSplit.of(MeshSpec.from_mapping({"dp_shard": 2})).rows(batch, 1) is batch


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="3 rows does not divide by 2"):
        RowSplit(shards=1, parts=2).rows(torch.ones(3, 2), 0)


# -- the model, as FSDP2 wants it ------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.ModuleList([nn.Linear(2, 2), nn.Embedding(2, 2)])
        self.layers = nn.ModuleDict({"0": Block(), "1": Block()})
        self.activations = nn.Sequential(nn.ReLU(), nn.ReLU())
        self.head = nn.ModuleList([nn.Linear(2, 2)])


class Holder(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = Network()
        self.heads = nn.ModuleList([nn.Linear(2, 2)])


def test_blocks_are_the_outermost_repeated_modules():
    holder = Holder()
    assert blocks(holder) == list(holder.network.layers.values())


def test_parts_look_into_lists():
    holder = Holder()
    assert parts(holder) == [holder.network, holder.heads[0]]


def test_mixed_precision_gathers_in_bfloat16_and_reduces_in_float32():
    mixed, whole = policy("bf16-mixed"), policy("32-true")
    assert (mixed.param_dtype, mixed.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert (whole.param_dtype, whole.reduce_dtype) == (None, None)


# -- for real --------------------------------------------------------------------------------------------------------


# Lightning's own broadcast of each batch, then: DDP's two buckets of 1.7 MB of gradients; FSDP2's gathers and scatters
# of two blocks and the root, which stays gathered for the backward.
LAUNCHES = {"ddp": 1 + 2, "fsdp2": 1 + 3 + 2 + 3}


@pytest.mark.matrix
@pytest.mark.parametrize("against", ["fsdp2", "ddp,fsdp2"])
def test_two_processes_compute_the_same_and_launch_what_is_known(against, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-autoparallel"])
    # DDP lays its buckets out anew in the second step
    few = ["--steps", "2", "--warmup", "2", "--rounds", "1", "--threads", "1", "--output", "result.json"]
    small = ["--strategy.compile", "false", "--data.init_args.max_bytes", "100000", "--limit-s", "90"]
    assert main(["bench", "--config", "llama3/debug", "--against", against, *few, *small]) == 0
    figures = json.loads(Path("result.json").read_text())
    assert figures["problems"] == []
    ours_, *others = figures["contenders"]
    assert max(other["loss_difference"] for other in others) < 1e-5
    launches = {other["name"]: other["median"]["launches"] for other in others}
    assert launches == {name: LAUNCHES[name] for name in against.split(",")}
    # that broadcast, and the ranks' agreement on what they are about to run
    assert ours_["median"]["launches"] == 2 + ours_["measured"][0]["planned_launches"] > 2
    assert all(one["median"]["peak_bytes"] > 0 for one in figures["contenders"])
    assert "cpu over gloo" in capsys.readouterr().out


def test_a_single_process_reads_the_rows_of_one_device():
    job = Job(config={}, contender=ours(), processes=1, warmup=2, steps=5)
    given = {"plugins": None, "max_steps": 200}
    assert timed_only(given, job)["use_distributed_sampler"] is False
    assert "use_distributed_sampler" not in timed_only(given, replace(job, processes=2))
