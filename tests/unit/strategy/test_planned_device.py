"""Plans for CUDA on a machine that has none: each beside the same model's plan for the CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lightning_autoparallel import plan
from lightning_autoparallel.cli.main import main
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.torch_compat import cuda_guards
from tests.numerics.models import MODELS
from tests.support.attention_kernels import EXPECTED
from tests.support.planned_on import ATTENTION, CUDNN, Dropping
from tests.support.scripts import run

pytestmark = pytest.mark.skipif(torch.backends.cuda.is_built(), reason="plans for its own GPU: tests/gpu")

PLAIN: list[str] = []  # products: heads that are too small, grouped ones with a mask, float64
MADE = ("aten.scalar_tensor", "aten.arange", "aten.full", "aten.lift", "aten._to_copy")
PINNED = ("aten.clone",)  # a copy that is still the host's
MASKS = ("aten.eq", "aten.masked_fill", "aten.triu")  # of Lightning's transformer, made on the CPU and moved
_MOVED = "a real tensor of the host is moved to the GPU while the step is captured, where there is none"
NOT_YET = {
    "hf_gpt2": _MOVED,
    "hf_llama": _MOVED,
    "transformer": "keeps its positions on the CPU by a test's own hand: no GPU would add them either",
}
COMMAND = ("plan", "--device", "cuda", "--trainer.precision", "bf16-mixed", "--config")
ROUNDS = 1.001  # one device's autocast computes a few more numbers in float32 than the other's


def guarded(*words: str) -> list[str]:
    """A command line of Python that starts with the library."""
    return ["env", f"LD_PRELOAD={cuda_guards.environment_with_guards()['LD_PRELOAD']}", sys.executable, *words]


def planned(on_cuda: Sequence[str], on_cpu: Sequence[str]) -> list[dict[str, Any]]:
    """What is found for models on each device, in processes of their own side by side."""
    plans = ("-m", "tests.support.planned_on")
    alone = ("env", "-u", "NODE_RANK")  # each of them, and no node of one job
    outputs = run([*alone, *guarded(*plans, "cuda", *on_cuda)], [*alone, sys.executable, *plans, "cpu", *on_cpu])
    return [json.loads(output.strip().splitlines()[-1]) for output in outputs]


def check_kernels(name: str, found: list[dict[str, Any]]) -> None:
    for there in found:
        assert there["devices"]["cuda"] > 0
        # tensors of the step's own Python lie where it made them, and may be moved
        may = ("constant_", *MADE, *(PINNED if name == "asking" else MASKS))
        assert all(made.startswith(may) for made in there["on_cpu"]), there["on_cpu"]
        assert there["attention"] == ATTENTION.get(name, PLAIN)
        assert there["times"] == ["backward", "forward"] and there["peak"] > 0


def check_beside(name: str, on_cuda: list[dict[str, Any]], on_cpu: list[dict[str, Any]]) -> None:
    for there, here in zip(on_cuda, on_cpu, strict=True):
        assert set(here["devices"]) == {"cpu"}
        assert there["moved"].keys() <= here["moved"].keys() | {"all_reduce dp_shard"}
        assert sum(there["moved"].values()) <= ROUNDS * sum(here["moved"].values())
        assert there["optimizer"] == here["optimizer"] > 0
    check_kernels(name, on_cuda)


def test_plans_for_cuda_compute_with_its_kernels_and_move_no_more():
    on_cuda, on_cpu = planned(["asking", "dropping 0.1", "masking", "grouping"], ["dropping 0.1", "masking"])
    for name in ("asking", "grouping"):  # CPUs repeat keys that heads share
        check_kernels(name, on_cuda[name])
    for name in on_cpu:
        check_beside(name, on_cuda[name], on_cpu[name])


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.xfail(strict=True, reason=NOT_YET[name])] if name in NOT_YET else [])
        for name in MODELS
    ],
)
def test_every_model_is_planned_for_cuda(name: str):
    on_cuda, on_cpu = planned([name], [name])
    check_beside(name, on_cuda[name], on_cpu[name])


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", ["llama3/debug", "llama3/1b", "llama3/8b", "llama3/70b"])
def test_every_recipe_is_planned_for_cuda(recipe: str, tmp_path):
    dump = tmp_path / "dump"
    with pytest.raises(SystemExit) as ended:
        main([*COMMAND, recipe, "--world-size", "64", "--dump", str(dump)])
    assert ended.value.code == 0
    captured = (dump / "training_step" / "captured.py.txt").read_text()
    assert CUDNN[0] in captured and CUDNN[1] in captured and "_for_cpu" not in captured


KERNELS = """
import json
from torch._subclasses import FakeTensorMode
from lightning_autoparallel.torch_compat.cuda_guards import seeming_cuda
from tests.support.attention_kernels import chosen_kernels
with seeming_cuda("h100", (9, 0)), FakeTensorMode():
    print(json.dumps(chosen_kernels()))
"""


def test_attention_takes_the_kernel_that_a_real_gpu_takes():
    (output,) = run(guarded("-c", KERNELS))
    assert json.loads(output.strip().splitlines()[-1]) == EXPECTED


PRECISIONS = """
import json, warnings
warnings.simplefilter("ignore")
from tests.support.planned_on import planned_on
asked = (16, "bf16", "16-mixed")
found = {str(p): planned_on("cuda", "dropping 0.0", {"dp_shard": 4}, "fsdp", p)["types"] for p in asked}
print(json.dumps(found))
"""


@pytest.mark.matrix
def test_precisions_are_those_of_cuda_by_each_of_their_names():
    (output,) = run(guarded("-c", PRECISIONS))
    types = json.loads(output.strip().splitlines()[-1])
    assert types["16"] == types["16-mixed"] and types["16"]["torch.float16"] == types["bf16"]["torch.bfloat16"] > 10


def test_the_command_starts_itself_with_what_it_needs(tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        main([*COMMAND, "llama3/debug", "--world-size", "4", "--dump", str(tmp_path)])
    assert ended.value.code == 0
    assert CUDNN[0] in (tmp_path / "training_step" / "captured.py.txt").read_text()


def test_a_loader_that_leaves_the_library_out_ends_it(monkeypatch, capfd):
    monkeypatch.setattr(cuda_guards, "_built", lambda: "/nowhere/none.so")
    with pytest.raises(SystemExit) as ended:
        main([*COMMAND, "llama3/debug", "--world-size", "4"])
    assert ended.value.code == 1
    assert "its loader has left that out" in capfd.readouterr().err


def test_python_says_how_to_plan_for_cuda():
    with pytest.raises(ConfigError, match=r"(?s)needs a GPU.*plan --device cuda.*environment_with_guards"):
        plan(Dropping(0.0), torch.zeros(4, 64, 256), world_size=4, device="cuda")
    with pytest.raises(ConfigError, match="'mps' must be 'cpu' or 'cuda'"):
        plan(Dropping(0.0), torch.zeros(4, 64, 256), world_size=4, device="mps")


@pytest.mark.parametrize(
    ("compiler", "said"),
    [("no-such-compiler -O2", "there is no no-such-compiler"), ("false", "false could not build")],
)
def test_without_a_compiler_that_works_nothing_is_left(compiler: str, said: str, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(ConfigError, match=said):
        cuda_guards.environment_with_guards()
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize(("cache", "said"), [("a folder", "space or colon"), ("/proc/none", "cannot be kept")])
def test_a_cache_that_does_not_do_is_named(cache: str, said: str, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
    with pytest.raises(ConfigError, match=f"{said}.*XDG_CACHE_HOME"):
        cuda_guards.environment_with_guards()
