"""Steps lowered for a Hopper GPU on a machine that has none: every kernel of theirs is one that its assembler takes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from lightning_autoparallel.torch_compat import cuda_guards
from tests.support.scripts import run

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="compiles for its own GPU: tests/gpu"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="pip install '.[kernels]'"),
]


@pytest.mark.parametrize("how", ["fsdp", "auto"])
@pytest.mark.parametrize("name", ["llama3", "dropping 0.1", "convnet", "transformer32"])
def test_all_kernels_of_a_step_are_compiled(name: str, how: str, tmp_path: Path):
    """Sharded on one axis, or found on two with tensor parallelism; a kernel that does not compile is an error."""
    preloaded = f"LD_PRELOAD={cuda_guards.environment_with_guards()['LD_PRELOAD']}"
    compiling = [sys.executable, "-m", "tests.support.hopper_kernels", name, how]
    (output,) = run(["env", "-u", "NODE_RANK", preloaded, *compiling], TRITON_CACHE_DIR=str(tmp_path))  # else kept
    graphs = json.loads(output.strip().splitlines()[-1])
    assert set(graphs) == {"forward", "backward"}
    for graph, kernels in graphs.items():
        assert kernels and all(size > 1000 for size in kernels.values()), graph
