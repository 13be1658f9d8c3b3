"""Kernels of a step's lowered graphs, compiled for a Hopper GPU that is not there.

`python -m tests.support.hopper_kernels MODEL PLAN` ends with JSON: of the machine code that Triton made for each graph
the bytes, by kernel; the mesh is that of ``planned_on`` for ``fsdp`` or ``auto``. Start it with
``cuda_guards.environment_with_guards()``, where Triton is installed beside torch's build for CPUs. Inductor asks a
device for its properties, Triton's driver for its target: both hear what an H100 would answer. Kernels go through
`ptxas`, and are never loaded.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor_config
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

from lightning_autoparallel.contracts import PartitionedGraph, PlanReport
from lightning_autoparallel.pipeline import stages
from lightning_autoparallel.torch_compat.inductor import compile_graph
from tests.support.planned_on import MESHES, planned_on

_SHARED_BYTES = 232_448  # of a block, at most, as CUDA's table of compute capability 9.0 has it
_H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    type="cuda",
    index=0,
    major=9,
    minor=0,
    warp_size=32,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    total_memory=80 * 2**30,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    L2_cache_size=50 * 2**20,
    shared_memory_per_block=49_152,
    shared_memory_per_block_optin=_SHARED_BYTES,
)
_SETTINGS = {
    "compile_threads": 1,  # in this process, which has the answers
    "fx_graph_cache": False,
    "triton.autotune_pointwise": False,  # of the sizes of blocks that it would try out, one
    "use_static_cuda_launcher": False,  # a part of torch's builds for CUDA
}


class _Driver(CudaDriver):
    """Triton's, of no device; ``made`` is what it was to load, by kernel."""

    def __init__(self) -> None:
        self.made: dict[str, bytes] = {}
        self.utils = SimpleNamespace(get_device_properties=self._properties, load_binary=self._load)
        self.launcher_cls = lambda source, metadata: None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def _properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": _SHARED_BYTES}

    def _load(self, name: str, code: bytes, shared_bytes: int, device: int) -> tuple[None, None, int, int, int]:
        """A module, a function, registers, spills and threads of a block."""
        self.made[f"{name} {len(self.made)}"] = code
        return None, None, 32, 0, 1024


@contextlib.contextmanager
def _hopper(triton_driver: _Driver) -> Iterator[None]:
    """Inside, Inductor and Triton compile for an H100."""
    answers: dict[str, Any] = {
        "torch.version.cuda": "13.0",
        "torch.cuda.get_device_properties": lambda *device: _H100,
        "torch.cuda._get_device_properties": lambda device: _H100,
        "torch.cuda._exchange_device": lambda device: 0,
        "torch.cuda._maybe_exchange_device": lambda device: 0,
        "torch._C._cuda_getCurrentRawStream": lambda device: 0,
    }
    with contextlib.ExitStack() as stack:
        for question, answer in answers.items():
            stack.enter_context(mock.patch(question, answer, create=True))
        for question in ("exchange_device", "maybe_exchange_device"):
            stack.enter_context(mock.patch.object(CudaInterface, question, staticmethod(lambda device: 0)))
        stack.enter_context(mock.patch.object(driver, "_active", triton_driver))
        stack.enter_context(inductor_config.patch(_SETTINGS))
        yield


def kernels_of(partitioned: PartitionedGraph) -> dict[str, dict[str, bytes]]:
    """The machine code of each graph's kernels, by graph and kernel."""
    found = {}
    for name, graph in partitioned.graphs().items():
        values = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        triton_driver = _Driver()
        with _hopper(triton_driver), detect_fake_mode(values):
            compile_graph(graph, is_inference=False, is_backward=name == "backward")
        found[name] = triton_driver.made
    return found


def compiled_for(name: str, mesh: dict[str, int], how: str) -> dict[str, dict[str, int]]:
    """Bytes of machine code of one model's kernels on one mesh, by graph and kernel."""
    made: list[dict[str, dict[str, bytes]]] = []
    predicted = stages.with_predictions

    def compiling(report: PlanReport, captured: Any, partitioned: PartitionedGraph, *others: Any) -> PlanReport:
        made.append(kernels_of(partitioned))
        return predicted(report, captured, partitioned, *others)

    with mock.patch.object(stages, "with_predictions", compiling):
        planned_on("cuda", name, mesh, how, "bf16-mixed")
    codes = made[-1]
    assert all(code.startswith(b"\x7fELF") for kernels in codes.values() for code in kernels.values())
    return {graph: {kernel: len(code) for kernel, code in kernels.items()} for graph, kernels in codes.items()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    assert not torch.backends.cuda.is_built(), "a build for CUDA asks its own driver"
    model, wanted = sys.argv[1:]
    (mesh,) = (mesh for mesh, how in MESHES if how == wanted)
    print(json.dumps(compiled_for(model, mesh, wanted)))
