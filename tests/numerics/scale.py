"""Capture, plan and apply LLaMA-3 8B on a fake world, in this one process, without its weights.

    python -m tests.numerics.scale [LAYERS] [RANKS]

Prints what tests/unit/pipeline/test_scale.py checks: seconds per stage, collectives (not in buckets, nor in parts),
parameter bytes, host memory.
"""

from __future__ import annotations

import resource
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_autoparallel.capture import NoEffects
from lightning_autoparallel.config import DecomposeSpec, EngineConfig, MeshSpec, PlanSpec
from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.mesh import build_mesh
from lightning_autoparallel.models.llama3 import Llama3, llama3_config
from lightning_autoparallel.pipeline import ControlGroup, StepCall, StepEngine
from lightning_autoparallel.pipeline.stages import StageContext
from lightning_autoparallel.torch_compat.collectives import init_fake_world


def plan_llama3_8b(layers: int, ranks: int, sequence: int = 8192) -> tuple[PlanReport, list[torch.Size]]:
    """The report of one training step under fsdp, and the shapes of all parameters; leaves no process group."""
    init_fake_world(ranks)
    try:
        with torch.device("meta"):
            model = Llama3(llama3_config("8B", {"n_layers": layers}))
        mesh = build_mesh(MeshSpec.from_mapping({"dp_shard": ranks}), "cpu")
        control = ControlGroup(timedelta(minutes=1))
        # one by one and whole, so that each parameter's can be counted
        counted = DecomposeSpec(when="never")
        config = EngineConfig(
            plan=PlanSpec.parse("fsdp"),
            compile=False,
            disabled_passes=("bucket_collectives",),
            decompose_matmuls=counted,
        )
        context = StageContext(mesh=mesh, config=config, control=control, warn=_refuse)
        engine = StepEngine(module=model, context=context, device=torch.device("cpu"))

        def run(batch: dict[str, torch.Tensor], watcher: Any) -> torch.Tensor:
            return F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())

        call = StepCall(
            name="training_step", run=run, effects=lambda _: NoEffects(), training=True, loss_leaf=lambda loss: loss
        )
        batch = {name: torch.zeros(1, sequence, dtype=torch.long) for name in ("inputs", "targets")}
        return engine.prepare(call, batch, {}), [parameter.shape for parameter in model.parameters()]
    finally:
        dist.destroy_process_group()


def _refuse(message: str) -> None:
    raise AssertionError(f"nothing in this model should need a warning: {message}")


def main(layers: int, ranks: int) -> None:
    """Print the figures."""
    report, shapes = plan_llama3_8b(layers, ranks)
    print("seconds", {stage: round(seconds, 2) for stage, seconds in report.timings_s.items()})
    for graph, table in report.collectives.items():
        print(graph, {kind: {axes: c.count for axes, c in per.items()} for kind, per in table.items()})
    whole = 4 * sum(shape.numel() for shape in shapes)
    print(f"parameter bytes per rank {report.parameters_bytes}, in all {whole}, parameters {len(shapes)}")
    print(f"peak host memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:] or ("32", "64")))
