"""What optimizers do to their parameters gives on shards what it gives on whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_autoparallel.pipeline.sharded_updates import ShardedUpdates
from lightning_autoparallel.torch_compat.assignments import assigned_in_shards
from lightning_autoparallel.torch_compat.sharding import StridedShard
from tests.support.worlds import Worlds

Update = Callable[[Tensor, Tensor], Any]  # of a parameter and a gradient; what it gives is compared, too


def _write_into_a_view(p: Tensor, g: Tensor) -> None:
    p.view(-1)[3:].add_(1)
    p.t()[0].zero_()
    p.data[1, 1:].view(-1).mul_(2)


def _assign(p: Tensor, g: Tensor) -> None:
    p.data = p.data - 0.5 * g


def _lists(p: Tensor, g: Tensor) -> Any:
    norms = torch._foreach_norm([p, g])
    torch._foreach_lerp_([p], [g], 0.1)
    torch._foreach_copy_([g], [torch.ones(p.shape)])
    return [*torch._foreach_add([p, g], [g, p]), *norms]


def _mask(p: Tensor, g: Tensor) -> None:
    p[g > 0] = 0.5
    g[p.eq(0.5)] = 0


def _mixed(p: Tensor, g: Tensor) -> Any:
    own = torch.zeros(p.shape)
    own.lerp_(g, 0.5)
    p.add_(own).addcdiv_(g, own.abs() + 1, value=0.1)
    return own


UPDATES: dict[str, Update] = {
    "elements": lambda p, g: p.add_(g.sign() * 0.1).clamp_(-1, 1).sqrt().nan_to_num_(),
    "scalars": lambda p, g: p.add_(g, alpha=-(0.1 / float(g.norm()))),
    "norms": lambda p, g: [p.norm(), g.norm(1), g.norm(float("inf")), g.norm(dim=0), g.norm(dim=1, keepdim=True)],
    "sums": lambda p, g: [p.sum(), g.sum(0), g.mean(), g.mean(0), g.mean(-1, keepdim=True), g.std()],
    "largest": lambda p, g: [p.max(), g.amin(), g.amax(0), g.max(dim=0)[0], g.argmax(), g.abs().max()],
    "questions": lambda p, g: [(g > 0).any(), (g > 0).all(0), torch.isfinite(p).all(), p.numel(), g.shape[0]],
    "products": lambda p, g: p.add_(g @ (g.t() @ g)),
    "outer": lambda p, g: p.mul_(g.square().mean(1, keepdim=True) * g.square().mean(0)),
    "narrow": lambda p, g: [g.bfloat16().norm(), g.bfloat16() @ g.bfloat16().T, g.half().sum(), g.bfloat16().mean()],
    "end to end": lambda p, g: torch.cat([p.reshape(-1), g.reshape(-1)]).dot(torch.cat([g.view(-1), p.view(-1)])),
    "sorted": lambda p, g: p.copy_(g.sort(dim=0)[0]),
    "decomposed": lambda p, g: p.copy_(torch.linalg.qr(g)[0]),
    "views": _write_into_a_view,
    "assigned": _assign,
    "lists": _lists,
    "mask": _mask,
    "mixed": _mixed,
    "drawn": lambda p, g: p.add_(torch.randn_like(p)).add_(g.normal_()),
    "made": lambda p, g: [torch.zeros_like(p), p.new_ones(p.shape[0]), p.clone(), torch.where(g > 0, g, p)],
}
LAYOUTS = {
    "rows": ((2,), (Shard(0),)),
    "columns": ((2,), (Shard(1),)),
    "both": ((2, 2), (Shard(1), Shard(0))),
    "rows of rows": ((2, 2), (StridedShard(0, split_factor=2), Shard(0))),
    "few rows": ((4,), (Shard(1),)),
    "replicas": ((2, 2), (Replicate(), Shard(0))),
}


def _start(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (8, 5) if name == "rows of rows" else (7, 5)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def _whole(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_whole(item) for item in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


@torch.no_grad()
def updated(layout: str) -> dict[str, Any]:
    """Parameter, gradient and result of every update, whole."""
    sizes, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", sizes)
    found = {}
    for name, update in UPDATES.items():
        torch.manual_seed(torch.distributed.get_rank())
        p, g = (distribute_tensor(tensor, mesh, placements) for tensor in _start(layout))
        p = nn.Parameter(p)
        with assigned_in_shards(), ShardedUpdates():
            result = update(p, g)
        assert p.placements == placements
        found[name] = [_whole(p.detach()), _whole(g), _whole(result)]
    return found


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "rows" else pytest.mark.matrix) for name in LAYOUTS]
)
@torch.no_grad()
def test_updates_are_those_of_whole_tensors(layout: str, worlds: Worlds) -> None:
    sizes, _ = LAYOUTS[layout]
    outcomes = worlds(2 if sizes == (2,) else 4).run(updated, layout)
    for name, update in UPDATES.items():
        torch.manual_seed(0)
        p, g = _start(layout)
        p = nn.Parameter(p)
        result = update(p, g)
        for outcome in outcomes:
            torch.testing.assert_close(
                outcome[name],
                [p.detach(), g, _whole(result)],
                rtol=1e-5,
                atol=1e-6,
                msg=lambda text, n=name: f"{n}: {text}",
            )
