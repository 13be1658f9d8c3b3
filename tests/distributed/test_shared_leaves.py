"""What ranks share in a batch is no rows where it happens to be as long as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.distributed.jobs import MESH, Net, assert_equals_one_device, failure, train
from tests.support.worlds import Worlds


class Anchored(Net):
    """Distances to 4 anchors, which every rank has in each batch beside its own 4 rows."""

    shared: ClassVar[str] = "anchors"

    def batches(self) -> list[Any]:
        anchors = torch.randn(4, 3, generator=torch.Generator().manual_seed(5))
        return [{"x": x, "y": y, self.shared: anchors.clone()} for x, y in super().batches()]

    def loader(self, rank: int, shards: int) -> DataLoader:
        count = self.rows // shards
        rows = slice(rank * count, (rank + 1) * count)
        batches = [{**batch, "x": batch["x"][rows], "y": batch["y"][rows]} for batch in self.batches()]
        return DataLoader(batches, batch_size=None)

    def loss(self, batch: Any) -> Tensor:
        near = torch.cdist(self.net(batch["x"]), batch[self.shared]).softmax(1)
        return (near * torch.arange(1.0, near.shape[1] + 1)).mean() + super().loss((batch["x"], batch["y"]))


class InTheLastBatch(Anchored):
    """Batches of 8 rows a rank, and a last one of 4."""

    rows = 16

    def batches(self) -> list[Any]:
        whole = super().batches()
        return [*whole[:2], {**whole[2], "x": whole[2]["x"][:8], "y": whole[2]["y"][:8]}]

    def loader(self, rank: int, shards: int) -> DataLoader:
        def mine(rows: Tensor) -> Tensor:
            return rows.chunk(shards)[rank]

        return DataLoader(
            [{**batch, "x": mine(batch["x"]), "y": mine(batch["y"])} for batch in self.batches()], batch_size=None
        )


class FilledLater(Anchored):
    """Anchors that are zeros at first, which any rank's rows may be."""

    def batches(self) -> list[Any]:
        first, *rest = super().batches()
        return [{**first, self.shared: torch.zeros(4, 3)}, *rest]


class Strict(Anchored):
    strategy: ClassVar[Mapping[str, Any]] = {"capture": "step"}


class Named(Anchored):
    """One that is told what is shared."""

    strategy: ClassVar[Mapping[str, Any]] = {"capture": "step", "batch_dims": {"anchors": None}}


class Targets(Strict):
    """Rows that are alike on both ranks, and said to be rows."""

    shared = "targets"
    strategy: ClassVar[Mapping[str, Any]] = {"capture": "step", "batch_dims": {"targets": 0}}

    def batches(self) -> list[Any]:
        return [{**batch, "targets": batch["targets"].repeat(2, 1)} for batch in super().batches()]

    def loader(self, rank: int, shards: int) -> DataLoader:
        loader = super().loader(rank, shards)
        count = self.rows // shards
        return DataLoader([{**b, "targets": b["targets"][:count]} for b in loader.dataset], batch_size=None)

    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch["x"]) - batch["targets"]).pow(2).mean()


class Positions(Strict):
    """Where each of a rank's rows is among them."""

    def batches(self) -> list[Any]:
        return [{**batch, "anchors": torch.arange(4)} for batch in super().batches()]

    def loss(self, batch: Any) -> Tensor:
        return super(Anchored, self).loss((batch["x"], batch["y"])) * batch["anchors"].sum()


class OneBatch(Strict):
    """Every rank trains on the same rows: nothing tells what of them is shared."""

    def loader(self, rank: int, shards: int) -> DataLoader:
        return super().loader(0, shards)


@pytest.mark.parametrize("kind", [Anchored, InTheLastBatch, FilledLater])
def test_a_step_that_ranks_share_a_leaf_of_runs_as_it_is_written(worlds: Worlds, kind: type[Net]) -> None:
    outcomes, expected = worlds(2).run(train, kind, MESH), train(kind, None)

    for outcome in outcomes:
        torch.testing.assert_close(outcome.parameters, expected.parameters, rtol=1e-5, atol=1e-6)
    (told,) = [said for said in outcomes[0].warnings if "batch leaf 'anchors'" in said]
    assert "batch_dims={'anchors': None}" in told


@pytest.mark.parametrize("kind", [Named, Targets])
def test_what_batch_dims_names_is_what_it_says(worlds: Worlds, kind: type[Net]) -> None:
    assert_equals_one_device(worlds(2).run(train, kind, MESH), train(kind, None))


@pytest.mark.parametrize("kind", [Strict, Positions])
def test_all_ranks_refuse_to_capture_it(worlds: Worlds, kind: type[Net]) -> None:
    for message, _ in worlds(2).run(failure, kind, MESH):
        assert "batch leaf 'anchors' of shape [4" in message
        assert "batch_dims={'anchors': 0}" in message


def test_one_batch_for_all_ranks_is_captured(worlds: Worlds) -> None:
    for message, _ in worlds(2).run(failure, OneBatch, MESH):
        assert message == "no error"
