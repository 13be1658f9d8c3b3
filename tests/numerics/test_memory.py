"""Predicted live bytes of a 4-layer LLaMA-3 are those that a real, interpreted step allocates, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest

from tests.numerics.memory import measure_step
from tests.numerics.rules import RULES
from tests.support.worlds import Worlds

TENSOR_PARALLEL = {"base": "fsdp", "rules": RULES["llama3"]}
CASES: dict[str, tuple[dict[str, int], Any, dict[str, Any]]] = {
    "fsdp": ({"dp_shard": 2}, "fsdp", {}),
    "fsdp_gathered_once": ({"dp_shard": 2}, "fsdp", {"reshard_after_forward": False}),
    "fsdp_bf16": ({"dp_shard": 2}, "fsdp", {"autocast": True}),
    "fsdp_no_passes": ({"dp_shard": 2}, "fsdp", {"disabled_passes": ("prefetch_gathers", "sink_waits")}),
    "ddp": ({"dp_replicate": 2}, "ddp", {}),
    "tp": ({"tp": 2}, TENSOR_PARALLEL, {}),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 2}, "hsdp", {}),
    "fsdp_tp": ({"dp_shard": 2, "tp": 2}, TENSOR_PARALLEL, {}),
    "fsdp_tp_bf16": ({"dp_shard": 2, "tp": 2}, TENSOR_PARALLEL, {"autocast": True}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "fsdp" else pytest.mark.matrix) for name in CASES]
)
def test_predicted_bytes_are_those_of_a_real_step(name: str, worlds: Worlds):
    mesh, plan, options = CASES[name]
    ranks = 1
    for size in mesh.values():
        ranks *= size
    for rank, halves in enumerate(worlds(ranks).run(_measure, mesh, plan, options)):
        for half, (measured, predicted) in halves.items():
            where = f"{half} of rank {rank}"
            assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.05), where
            assert predicted.final_bytes == pytest.approx(measured.final_bytes, rel=0.05), where


def _measure(mesh: dict[str, int], plan: Any, options: dict[str, Any]) -> Any:
    return measure_step(mesh, plan, **options)
