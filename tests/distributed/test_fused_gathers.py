"""Fused gathers on two by two real ranks, over the flattened group and over the one with reordered ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lightning_autoparallel import parallelize
from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.mesh import build_mesh
from lightning_autoparallel.passes import joint_groups
from lightning_autoparallel.passes.fuse_chained_all_gathers import fuse_chained_all_gathers
from tests.numerics.chained_gathers import whole_in_backward
from tests.support.placements import S
from tests.support.sgd import sgd_losses
from tests.support.worlds import Worlds
from tests.unit.passes.chains import Chains, gathering

AXES = {"dp_shard": 2, "tp": 2}
PASS, STEPS = "fuse_chained_all_gathers", 20


def gather_both_ways() -> dict[str, tuple[bool, bool]]:
    """Mesh axes of the one gather -> whether this rank gets the full tensor, without the pass and with it."""
    mesh = build_mesh(MeshSpec.from_mapping(AXES), "cpu")
    axes = [axis for name in AXES if (axis := mesh.plan_axis((name,))) is not None]
    full = torch.arange(8 * 6.0).reshape(8, 6)
    results = {}
    for source, order in (((S(0), S(0)), (1, 0)), ((S(0), S(1)), (0, 1))):
        (shard,) = Chains(2, 2).shards(full, source)[dist.get_rank()]
        equal = []
        graph = gathering(axes, full.shape, source, order)
        for _ in range(2):
            mesh.make_groups(set(mesh.axes_by_group()))
            (result,) = fx.GraphModule(nn.Module(), graph)(shard)
            equal.append(torch.equal(result, full))
            fuse_chained_all_gathers(graph, join=joint_groups(mesh))
        (gather,) = fxn.collectives_of(graph)
        results[mesh.axes_by_group()[fxn.group_of(gather)]] = (equal[0], equal[1])
    return results


class Columns(nn.Module):
    """Two products; tp cuts the first weight by rows and the second by columns.

    Under autocast: gathers of one value take one step, so that a chain needs a cast between the weight and its readers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.second(torch.tanh(self.first(x)))
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def train(folder: str) -> list[tuple[list[float], dict[str, int]]]:
    """Losses of 20 steps and all-gathers of the backward by mesh axes, without the pass and with it."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 4, 6, generator=generator)
    y = torch.randint(0, 4, (4, 4), generator=generator)
    rules: dict[str, Any] = {"first.*": {"tp": "S(0)"}, "second.weight": {"tp": "S(1)"}}
    plan = {"base": "fsdp", "rules": rules}
    parallelize(Columns(), (x, y), AXES, plan, compile=False, dump_dir=folder)
    path = Path(folder) / "changed.json"
    if dist.get_rank() == 0:
        document = json.loads((Path(folder) / "forward_backward" / "plan.json").read_text())
        assert whole_in_backward(document) == 1
        path.write_text(json.dumps(document))
    dist.barrier()
    return [_losses(x, y, str(path), disabled) for disabled in ([PASS], [])]


def _losses(x: Tensor, y: Tensor, plan: str, disabled: list[str]) -> tuple[list[float], dict[str, int]]:
    torch.manual_seed(0)
    parallel = parallelize(Columns(), (x, y), AXES, plan, compile=False, disabled_passes=disabled)
    half = dist.get_rank() // AXES["tp"]
    losses = sgd_losses(parallel, STEPS, x.chunk(2)[half], y.chunk(2)[half])
    gathers = parallel.report.collectives["backward"]["all_gather"]
    return losses, {axes: counted.count for axes, counted in gathers.items()}


def one_device() -> list[float]:
    """The losses of the same training without any parallelism."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 4, 6, generator=generator)
    y = torch.randint(0, 4, (4, 4), generator=generator)
    torch.manual_seed(0)
    return sgd_losses(Columns(), STEPS, x, y)


def test_both_orders_gather_the_full_tensor(worlds: Worlds):
    expected = {"dp_shard,tp": (True, True), "tp,dp_shard": (True, True)}
    assert worlds(4).run(gather_both_ways) == [expected] * 4


def test_training_with_a_fused_chain_is_that_of_one_device(worlds: Worlds, tmp_path: Path):
    (plain, before), (fused, after) = worlds(4).run(train, str(tmp_path))[0]
    assert "tp,dp_shard" not in before and after["tp,dp_shard"] == 1
    assert sum(after.values()) == sum(before.values()) - 1
    assert fused[0] == pytest.approx(plain[0], rel=1e-6)
    assert fused == pytest.approx(plain, rel=1e-5)
    assert fused == pytest.approx(one_device(), rel=1e-2)  # bfloat16 has 8 bits
