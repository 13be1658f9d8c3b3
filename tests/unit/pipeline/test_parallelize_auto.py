"""``parallelize`` finds its plan for the hardware and the memory that it is told of, as the strategy does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_autoparallel import parallelize
from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.mesh import ParallelMesh


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def planned(mesh: ParallelMesh, **options: Any) -> PlanReport:
    with torch.device("meta"):
        module = Net()
    return parallelize(module, (torch.zeros(64, 512),), mesh, "auto", compile=False, **options).report


def test_the_budget_decides_how_much_is_shared_out(fake_mesh: Callable[..., ParallelMesh]) -> None:
    """Four copies of 4.2 MB in float32 lie whole where they may, and not where 8 MB is all that there is."""
    mesh = fake_mesh(dp_shard=8)
    slow_links = {"base": "h100", "intra_node": {"bandwidth_gb_per_s": 1.0}, "optimizer_gb_per_s": 1e4}
    roomy, tight = (planned(mesh, hardware=slow_links, memory_budget_gib=budget) for budget in (1.0, 8e6 / 2**30))
    assert roomy.parameters_bytes == pytest.approx(4 * (512 * 512 + 512) * 4, rel=1e-3)
    assert tight.parameters_bytes < roomy.parameters_bytes / 2


def test_predictions_are_for_the_hardware(fake_mesh: Callable[..., ParallelMesh]) -> None:
    mesh = fake_mesh(dp_shard=2)
    reports = [planned(mesh, hardware=name) for name in ("h100", "a100-80gb")]
    assert [report.hardware["name"] for report in reports] == ["h100", "a100-80gb"]
    with pytest.raises(ConfigError, match="h1000"):
        planned(mesh, hardware="h1000")
    with pytest.raises(ConfigError, match="memory_budget_gib=-1"):
        planned(mesh, memory_budget_gib=-1)
