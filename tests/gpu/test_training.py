"""Trained on one GPU with and without us: the same losses, metrics, weights and buffers, compiled and not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.numerics.compare import case_of, check_outcomes
from tests.numerics.training import Case, Outcome, run_case, run_rank

pytestmark = pytest.mark.gpu

MESH = (("dp_shard", 1),)
MODELS = (
    "llama3",
    "hf_llama",
    "hf_gpt2",
    "transformer32",
    "attention",
    "convnet",
    "tied",
    "ignore_index",
    "checkpointed",
)
TIMEOUT_S = 240


def in_float32(case: Case) -> Outcome:
    """One device without us, its convolutions in float32 too."""
    torch.backends.cudnn.allow_tf32 = False
    return run_case(case, None)


def ours_in_float32(case: Case) -> Outcome:
    """One rank of ours, likewise."""
    torch.backends.cudnn.allow_tf32 = False
    return run_rank(case)


def check(case: Case, gpu_world) -> Outcome:
    """Train with and without us in the process on the GPU, and compare."""
    ours = gpu_world().run(ours_in_float32, case, timeout_s=TIMEOUT_S)
    return check_outcomes(case, ours, lambda plain: gpu_world().run(in_float32, plain, timeout_s=TIMEOUT_S)[0])


@pytest.mark.parametrize("compiled", [False, True], ids=["interpreted", "compiled"])
@pytest.mark.parametrize("model", MODELS)
def test_training_equals_eager(model: str, compiled: bool, accelerator: str, gpu_world):
    check(case_of(model, mesh=MESH, compile=compiled, accelerator=accelerator), gpu_world)


@pytest.mark.parametrize("plan", ["auto", "ddp"])
def test_other_plans(plan: str, accelerator: str, gpu_world):
    check(Case(model="llama3", mesh=MESH, plan=plan, compile=True, accelerator=accelerator), gpu_world)


@pytest.mark.parametrize("settings", [{"clip": 0.05}, {"accumulate": 4}, {"clip": 0.05, "accumulate": 2}], ids=str)
def test_clipped_and_accumulated(settings, accelerator: str, gpu_world):
    check(Case(model="hf_gpt2", mesh=MESH, compile=True, accelerator=accelerator, **settings), gpu_world)


@pytest.mark.parametrize("model", ["llama3", "hf_gpt2", "convnet"])
@pytest.mark.parametrize("compiled", [False, True], ids=["interpreted", "compiled"])
def test_in_bfloat16(model: str, compiled: bool, accelerator: str, gpu_world):
    case = Case(model=model, mesh=MESH, precision="bf16-mixed", compile=compiled, accelerator=accelerator)
    check(replace(case, optimizer="sgd"), gpu_world)
