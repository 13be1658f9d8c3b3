"""A step's own collectives over all ranks count rows twice where two ranks have the same, and that is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from tests.distributed.jobs import MESH, Net, train
from tests.support.worlds import Worlds

RULES = {"net.0.weight": {"tp": "S(0)"}}
TOLD = "autoparallel: training_step calls collectives of torch.distributed over all 2 ranks, of which 2 at a time"


class Counting(Net):
    """Rows of all ranks, counted by torch's own function."""

    strategy: ClassVar[Mapping[str, Any]] = {"capture": "forward", "plan": {"base": "fsdp", "rules": RULES}}

    def training_step(self, batch, batch_idx):
        rows = torch.tensor(len(batch[0]))
        if dist.is_initialized():
            dist.all_reduce(rows)
        return super().training_step(batch, batch_idx) / rows


class Sharing(Counting):
    strategy: ClassVar[Mapping[str, Any]] = {"capture": "forward", "plan": "fsdp"}


class Gathering(Counting):
    """By Lightning's own, and logged over ranks."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("rows", float(len(self.all_gather(batch[0]))), sync_dist=True)
        return loss


@pytest.mark.parametrize(
    ("kind", "mesh", "times"), [(Counting, {"tp": 2}, 1), (Sharing, MESH, 0), (Gathering, {"tp": 2}, 0)]
)
def test_it_is_told_once(kind: type[Net], mesh: Mapping[str, int], times: int, worlds: Worlds) -> None:
    first, second = worlds(2).run(train, kind, mesh)
    assert len([said for said in first.warnings if said.startswith(TOLD)]) == times
    assert not any(said.startswith(TOLD) for said in second.warnings)  # rank 0 speaks for all
