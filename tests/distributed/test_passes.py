"""Every pass, switched off by name, against the graph without it: the same training, and what the report says of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_autoparallel import AutoParallelStrategy, parallelize
from lightning_autoparallel.errors import PassError
from lightning_autoparallel.passes import joint_passes
from tests.worlds import Worlds

ROWS, STEPS = 8, 20


class TwoHeads(nn.Module):
    """Two losses that both count the same targets: the count is computed, and without the pass reduced, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 5), nn.Linear(10, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return sum(F.cross_entropy(head(hidden), y, ignore_index=0) for head in (self.first, self.second))


def train(disabled: list[str]) -> tuple[list[float], int, list[str]]:
    """Losses of 20 steps on this rank, launches per step, and the names of the passes in the report."""
    torch.manual_seed(0)
    module = TwoHeads()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 6, generator=generator)
    y = torch.randint(0, 5, (ROWS,), generator=generator)
    size = {"dp_shard": dist.get_world_size()}
    parallel = parallelize(module, (x, y), size, compile=False, disabled_passes=disabled)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    rank, size = dist.get_rank(), dist.get_world_size()
    losses = []
    for _ in range(STEPS):
        loss = parallel(x.chunk(size)[rank], y.chunk(size)[rank])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    reports = parallel.report.passes
    for report in reports:
        saved = sum(c.count for table in report.before.values() for c in table.values())
        saved -= sum(c.count for table in report.after.values() for c in table.values())
        assert saved == 1 and report.notes == ("1 collectives merged",), report
    return losses, sum(parallel.report.launches().values()), [report.name for report in reports]


@pytest.mark.parametrize("name", [graph_pass.name for graph_pass in joint_passes()])
def test_a_pass_changes_launches_and_no_numbers(name: str, worlds: Worlds):
    with_it, without = worlds(2).run(train, [])[0], worlds(2).run(train, [name])[0]
    assert with_it[0][0] == pytest.approx(without[0][0], rel=1e-6)
    assert with_it[0] == pytest.approx(without[0], rel=1e-5)
    assert with_it[1] < without[1]
    assert name in with_it[2] and name not in without[2]


def test_an_unknown_pass_is_refused_when_the_strategy_is_made():
    with pytest.raises(
        PassError, match="no pass is called 'bucket_everything': passes are merge_identical_collectives"
    ):
        AutoParallelStrategy(disabled_passes=["bucket_everything"])
