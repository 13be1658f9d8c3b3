"""Clipped gradients are those of one device, at the price of one all-reduce per optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.mesh import build_mesh
from lightning_autoparallel.precision import clip_by_norm
from lightning_autoparallel.torch_compat.collectives import launched_collectives
from lightning_autoparallel.torch_compat.sharding import StridedShard
from tests.distributed.jobs import MESH, Net, assert_equals_one_device, train
from tests.support.launches import Launches
from tests.support.worlds import Worlds

TWO_BY_TWO = {"dp_replicate": 2, "dp_shard": 2}


class Clipped(Net):
    """Rows that divide by nothing, scalars, frozen and unused parameters; every gradient is over the limit."""

    steps = 6
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "fsdp"}
    trainer_options: ClassVar[Mapping[str, Any]] = {"gradient_clip_val": 0.1}

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Linear(5, 5)
        self.launches = Launches()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x) * self.scale + self.frozen, y)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5, momentum=0.9)

    def callbacks(self) -> list[Callback]:
        return [self.launches]

    def extra(self) -> Any:
        return self.launches.counts


class ClippedByValue(Clipped):
    trainer_options: ClassVar[Mapping[str, Any]] = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}


class ClippedReplicated(Clipped):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "ddp"}


class ClippedHybrid(Clipped):
    """Sharded over one batch axis, replicated over the other."""

    strategy: ClassVar[Mapping[str, Any]] = {"plan": "hsdp"}


class ClippedAccumulated(Clipped):
    trainer_options: ClassVar[Mapping[str, Any]] = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 4}


class NeverOverTheLimit(Clipped):
    trainer_options: ClassVar[Mapping[str, Any]] = {"gradient_clip_val": 1e6}


class NotClipped(Clipped):
    trainer_options: ClassVar[Mapping[str, Any]] = {}


class ClipsItself(Clipped):
    """The hook of Lightning for one's own limit."""

    trainer_options: ClassVar[Mapping[str, Any]] = {}

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


@pytest.mark.parametrize(
    ("kind", "mesh", "launched"),
    [
        (Clipped, MESH, [1] * 6),
        (Clipped, TWO_BY_TWO, [1] * 6),
        (ClippedHybrid, TWO_BY_TWO, [1] * 6),
        (ClippedReplicated, MESH, [1] * 6),
        (ClippedAccumulated, MESH, [1] * 2),
        (ClippedByValue, MESH, [0] * 6),
        (ClipsItself, MESH, [1] * 6),
        (NeverOverTheLimit, MESH, [1] * 6),
        (NotClipped, MESH, [0] * 6),
    ],
)
def test_clipping_is_that_of_one_device(kind, mesh, launched: list[int], worlds: Worlds) -> None:
    expected = train(kind, None)
    world = 2 if mesh is MESH else 4
    outcomes = worlds(world).run(train, kind, mesh, world)
    assert_equals_one_device(outcomes, expected)
    for outcome in outcomes:
        assert outcome.extra == launched


def test_the_limits_mattered() -> None:
    free = train(NotClipped, None).losses
    assert train(NeverOverTheLimit, None).losses == free
    for kind in (Clipped, ClippedByValue, ClipsItself):
        assert train(kind, None).losses[1:] != free[1:]


SHAPES = [(8, 3), (5, 2), (4, 6), (7,), ()]


def whole_gradients(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def clip_on_a_mesh(limit: float, dtype: torch.dtype) -> tuple[float, list[Tensor], int]:
    """Norm and clipped gradients, each of them placed differently on a 2 x 2 mesh, and the collectives that took."""
    ranks = build_mesh(MeshSpec.from_mapping({"dp_shard": 2, "tp": 2}), "cpu").submesh(("dp_shard", "tp"))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    placements = [
        (StridedShard(0, split_factor=2), Shard(0)),
        (Shard(0), Replicate()),
        (Shard(0), Shard(1)),
        (Replicate(), Shard(0)),
        (Replicate(), Replicate()),
    ]
    whole = whole_gradients(dtype)
    gradients = [distribute_tensor(value, mesh, placed) for value, placed in zip(whole, placements, strict=True)]
    group = ranks.get_group().group_name
    before = launched_collectives(group)
    norm = clip_by_norm(gradients, limit, ranks)
    launched = launched_collectives(group) - before
    return float(norm), [gradient.full_tensor() for gradient in gradients], launched


@pytest.mark.parametrize("limit", [0.5, 100.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
def test_shards_of_all_kinds_count_once(limit: float, dtype: torch.dtype, tolerance: float, worlds: Worlds) -> None:
    parameters = [nn.Parameter(value.float()) for value in whole_gradients(dtype)]
    for parameter, value in zip(parameters, whole_gradients(dtype), strict=True):
        parameter.grad = value.float()
    expected = torch.nn.utils.clip_grad_norm_(parameters, limit)
    for norm, gradients, launched in worlds(4).run(clip_on_a_mesh, limit, dtype):
        assert norm == pytest.approx(float(expected), rel=1e-6)
        assert launched == 1
        for gradient, parameter in zip(gradients, parameters, strict=True):
            assert gradient.dtype == dtype
            torch.testing.assert_close(gradient.float(), parameter.grad, rtol=tolerance, atol=0)


def test_nothing_to_clip_talks_to_nobody() -> None:
    assert not dist.is_initialized()
    assert float(clip_by_norm([], 1.0, None)) == 0.0
