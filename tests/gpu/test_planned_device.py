"""Plans for this GPU, beside what planning for a GPU that is not there takes for granted."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.attention_kernels import EXPECTED, chosen_kernels
from tests.support.planned_on import ATTENTION, CUDNN
from tests.support.scripts import run

pytestmark = pytest.mark.gpu

NAMES = (*ATTENTION, "hf_llama", "hf_gpt2")
PLAN = ("-m", "lightning_autoparallel.cli.main", "plan", "--trainer.precision", "bf16-mixed", "--world-size", "8")


def test_attention_takes_the_kernels_that_are_expected_of_it(accelerator: str, gpu_world):
    if accelerator == "cpu":
        pytest.skip("a CPU has kernels of its own")
    assert gpu_world().run(chosen_kernels)[0] == EXPECTED


@pytest.mark.parametrize("name", NAMES)
def test_models_are_planned_for_this_device(name: str, accelerator: str):
    device = "cuda" if accelerator == "gpu" else "cpu"
    (output,) = run([sys.executable, "-m", "tests.support.planned_on", device, name])
    for found in json.loads(output.strip().splitlines()[-1])[name]:
        assert found["devices"][device] > 0 and found["peak"] > 0 and found["times"] == ["backward", "forward"]
        if accelerator == "gpu":
            assert found["attention"] == ATTENTION.get(name, [])


def test_the_command_plans_for_this_device(accelerator: str, tmp_path):
    device = "cuda" if accelerator == "gpu" else "cpu"
    run([sys.executable, *PLAN, "--device", device, "--config", "llama3/debug", "--dump", str(tmp_path)])
    captured = (tmp_path / "training_step" / "captured.py.txt").read_text()
    assert ("flash_attention_for_cpu" in captured) == (accelerator == "cpu")
    assert (CUDNN[1] in captured) == (accelerator == "gpu")
