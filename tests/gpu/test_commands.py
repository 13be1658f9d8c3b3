"""The command line on one GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_autoparallel.cost import hardware_from

pytestmark = pytest.mark.gpu


def run(*command: str, timeout_s: float = 280) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_autoparallel.cli.main", *command],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout + done.stderr


def test_a_recipe_trains(accelerator: str, tmp_path: Path):
    devices = ["--trainer.accelerator", accelerator, "--trainer.devices", "1", "--trainer.precision", "bf16-mixed"]
    logs = ["--trainer.logger.init_args.save_dir", str(tmp_path)]
    shown = run("fit", "--config", "llama3/debug", *devices, "--trainer.max_steps", "40", *logs)
    assert re.search(r"measured: (allocator|process) peak per step", shown), shown[-3000:]
    rows = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    column = rows[0].split(",").index("train_loss")
    losses = [float(row.split(",")[column]) for row in rows[1:] if row.split(",")[column]]
    assert losses[-1] < losses[0] - 1.0, losses  # of bytes, whose first loss is ln 256


def test_rates_are_measured_and_read(accelerator: str, tmp_path: Path):
    output = str(tmp_path / "rates.yaml")
    device = "cuda" if accelerator == "gpu" else "cpu"
    run("calibrate", "--device", device, "--processes", "1", "--spent-s", "0.05", "--output", output)
    found = hardware_from(output)
    if accelerator == "gpu":
        assert found.backend == "nccl"
        assert found.peak_tflops["bfloat16"] > found.peak_tflops["float32"] > 0


def test_a_rank_of_a_large_job_is_rehearsed(accelerator: str, tmp_path: Path):
    """Its peak, by the allocator, is the predicted one; on a CPU a small model stands in."""
    figures = tmp_path / "figures.json"
    sizes = {
        "gpu": ("llama3/8b", "--world-size", "128", "--strategy.plan", "fsdp", "--strategy.mesh", "{dp_shard: -1}"),
        "cpu": ("llama3/debug", "--world-size", "64", "--strategy.plan", "fsdp"),
    }
    options = ("--strategy.compile", "false", "--data.init_args.batch_size", "1", "--trainer.accelerator", accelerator)
    shown = run("rehearse", "--config", *sizes[accelerator], *options, "--steps", "2", "--output", str(figures))
    found = json.loads(figures.read_text())
    assert found["measured"]["parameters_bytes"] == found["predicted"]["parameters_bytes"], shown
    assert found["measured"]["peak_bytes"] == pytest.approx(found["predicted"]["peak_bytes"], rel=0.05), shown


def test_this_device_is_detected(accelerator: str):
    if accelerator == "cpu":
        pytest.skip("a CPU is a CPU")
    import torch

    from lightning_autoparallel.cost.detect import detected_hardware

    name = torch.cuda.get_device_name().lower()
    assert detected_hardware("cuda", otherwise="cpu").name.lower().partition("-")[0] in name
