"""What hooks save by torch, in a real world of two ranks."""

from __future__ import annotations

import io
from typing import Any, ClassVar

import torch
from torch.testing import assert_close

from tests.distributed.jobs import MESH, Net, assert_equals_one_device, failure, train
from tests.support.worlds import Worlds


class Saves(Net):
    """The network's weights as rank 0 saves them at the end, loaded as one loads a file of one device."""

    strategy: ClassVar = {"plan": "ddp"}

    def on_train_end(self) -> None:
        self.stream = io.BytesIO()
        if self.trainer.is_global_zero:
            torch.save(self.net.state_dict(), self.stream)

    def extra(self) -> Any:
        if not self.stream.tell():
            return None
        self.stream.seek(0)
        return torch.load(self.stream, weights_only=True)


class SavesShards(Saves):
    strategy: ClassVar = {"plan": "fsdp"}

    def on_train_end(self) -> None:
        torch.save(self.net.state_dict(), io.BytesIO())


def test_whole_weights_are_saved_as_on_one_device(worlds: Worlds) -> None:
    expected = train(Saves, None)
    outcomes = worlds(2).run(train, Saves, MESH, 2)
    assert_equals_one_device(outcomes, expected)
    assert outcomes[1].extra is None and all(type(tensor) is torch.Tensor for tensor in outcomes[0].extra.values())
    assert_close(outcomes[0].extra, dict(expected.extra), rtol=1e-5, atol=1e-6)


def test_a_rank_s_part_of_weights_is_not_saved(worlds: Worlds) -> None:
    for said, _ in worlds(2).run(failure, SavesShards, MESH, 2):
        assert "test_saved_by_hooks.py:" in said and "trainer.save_checkpoint" in said
