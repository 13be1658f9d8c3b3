"""LLaMA-3 whose forward computes with weights sharded over tp and whose backward computes with two of a layer whole.

    python -m tests.numerics.chained_gathers [LAYERS]

A stored plan makes it so: the backward of every product whose weight tp cuts by columns (attention's `wo`, the feed
forward's `w2`) is placed by hand, along the sequence instead of across the weight. In the backward each of these is
gathered over dp_shard, as in the forward, and then over tp. Plans 8B on 16 x 8 fake ranks, and prints what
tests/unit/pipeline/test_chained_gathers.py checks of a small one.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx

from lightning_autoparallel.capture import StepRequest, capture_step
from lightning_autoparallel.config import EngineConfig, MeshSpec, PlanSpec
from lightning_autoparallel.contracts import CompiledStep
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.mesh import ParallelMesh, build_mesh
from lightning_autoparallel.models.llama3 import Llama3, llama3_config
from lightning_autoparallel.pipeline import ControlGroup
from lightning_autoparallel.pipeline.stages import StageContext, build_step
from lightning_autoparallel.plan import make_plan, plan_document
from lightning_autoparallel.torch_compat.collectives import init_fake_world
from tests.numerics.rules import RULES
from tests.unit._graphs import request_of

AXES = {"dp_shard": 16, "tp": 8}
SMALL = {"dim": 128, "n_heads": 8, "n_kv_heads": 8, "vocab_size": 256}


def whole_in_backward(document: dict[str, Any]) -> int:
    """Change a plan's document; how many products it now computes with a whole weight."""
    changed = 0
    for entry in document["nodes"]:
        if "'abc,cd->abd'" in entry["call"] and entry["inputs"][1] == ["R", "S(1)"]:
            entry |= {"inputs": [["S(0)", "S(1)"], ["R", "R"]], "outputs": [["S(0)", "S(1)"]]}
            changed += 1
    return changed


def llama_request(size: str, sequence: int, overrides: Mapping[str, Any]) -> StepRequest:
    """One training step of LLaMA-3 under autocast, on the meta device, of one sequence per rank of dp_shard."""
    with torch.device("meta"):
        model = Llama3(llama3_config(size, dict(overrides)))

    def run(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch["inputs"])
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    batch = {name: torch.zeros(1, sequence, dtype=torch.long) for name in ("inputs", "targets")}
    return request_of(model, batch, run, shards=AXES["dp_shard"])


def write_plan(request: StepRequest, path: Path) -> None:
    """Store the changed plan of the step."""
    spec = PlanSpec.parse({"base": "fsdp", "rules": RULES["llama3"]})
    with fake_mesh() as mesh:
        captured = capture_step(request)
        document = plan_document(captured, make_plan(captured, spec, mesh, print), spec, mesh)
    assert whole_in_backward(document) > 0
    path.write_text(json.dumps(document))


def build_stored(request: StepRequest, path: Path, *disabled: str) -> CompiledStep:
    """The step under the stored plan, without the passes named."""
    config = EngineConfig(plan=PlanSpec.parse(str(path)), compile=False, disabled_passes=disabled)
    with fake_mesh() as mesh:
        control = ControlGroup(timedelta(minutes=1))
        return build_step(request, StageContext(mesh=mesh, config=config, control=control, warn=print))


@contextlib.contextmanager
def fake_mesh() -> Iterator[ParallelMesh]:
    """16 x 8 fake ranks; leaves no process group."""
    init_fake_world(128)
    try:
        yield build_mesh(MeshSpec.from_mapping(AXES), "cpu")
    finally:
        dist.destroy_process_group()


def chains_in(graph: fx.Graph) -> int:
    """All-gathers of what another all-gather's wait gave, looked at through one-argument calls that keep the size."""
    gathers = [node for node in fxn.collectives_of(graph) if fxn.collective_kind(node) == "all_gather"]
    return sum(any(_is_gathered(source) for source in gather.all_input_nodes) for gather in gathers)


def _is_gathered(source: fx.Node) -> bool:
    while _keeps_size(source):
        source = source.all_input_nodes[0]
    (launched,) = source.all_input_nodes if fxn.is_wait(source) else (None,)
    return launched is not None and fxn.collective_kind(launched) == "all_gather"


def _keeps_size(node: fx.Node) -> bool:
    if node.op != "call_function" or fxn.is_wait(node) or len(node.all_input_nodes) != 1:
        return False
    value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return isinstance(source, torch.Tensor) and isinstance(value, torch.Tensor) and value.numel() == source.numel()


def main(layers: int) -> None:
    """Print chains and gathers without and with the pass, and once they are merged."""
    request = llama_request("8B", 8192, {"n_layers": layers})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        write_plan(request, path)
        fuse, merge = "fuse_chained_all_gathers", "bucket_collectives"
        # a bucket hides the chains that lead through it, so they are counted before there are any
        steps = {
            "without the pass, one by one": build_stored(request, path, fuse, merge),
            "with the pass, one by one": build_stored(request, path, merge),
            "with the pass, in buckets": build_stored(request, path),
        }
    for words, step in steps.items():
        halves = {"forward": step.partitioned.forward, "backward": step.partitioned.backward}
        print(words)
        for name, half in halves.items():
            gathers = step.report.collectives[name].get("all_gather", {})
            counts = {axes: counted.count for axes, counted in gathers.items()}
            print(f"  {name}: chains {chains_in(half.graph) if half is not None else 0}, all-gathers {counts}")
        for done in step.report.passes:
            if done.name == "fuse_chained_all_gathers":
                print(f"  {done.graph}: {done.seconds:.2f} s, {done.notes}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 32)
