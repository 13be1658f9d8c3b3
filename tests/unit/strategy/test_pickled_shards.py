"""Tensors that hooks save by themselves."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_autoparallel.errors import CheckpointError
from lightning_autoparallel.strategy.mixed_operands import MixedOperands
from tests.unit.strategy.test_mixed_operands import Computing


def saved(value: object, is_inside: bool = False) -> io.BytesIO:
    """What a hook wrote by ``torch.save``."""
    stream = io.BytesIO()
    with MixedOperands(Computing(), lambda name: None, lambda: is_inside):  # type: ignore[arg-type]
        torch.save(value, stream)
    stream.seek(0)
    return stream


def lying(fake_mesh, placement) -> DTensor:
    return distribute_tensor(torch.arange(12.0).view(3, 4), fake_mesh(dp_shard=2).submesh(("dp_shard",)), [placement])


def test_a_file_of_one_rank_s_rows_is_refused(fake_mesh) -> None:
    with pytest.raises(CheckpointError, match=r"test_pickled_shards.py:\d+ saves .* shape \(3, 4\)") as refused:
        saved({"weight": lying(fake_mesh, Shard(0))})
    assert "trainer.save_checkpoint" in str(refused.value)


def test_what_is_whole_is_saved_as_on_one_device(fake_mesh) -> None:
    whole = lying(fake_mesh, Replicate())
    tied = nn.Parameter(whole, requires_grad=False)
    found = torch.load(saved({"tensor": whole, "tied": [tied, tied]}), weights_only=True)
    assert type(found["tensor"]) is torch.Tensor and torch.equal(found["tensor"], torch.arange(12.0).view(3, 4))
    first, second = found["tied"]
    assert type(first) is nn.Parameter and first is second and not first.requires_grad


def test_copies_of_shards_stay_shards(fake_mesh) -> None:
    shard = nn.Parameter(lying(fake_mesh, Shard(0)))
    with MixedOperands(Computing(), lambda name: None, lambda: False):  # type: ignore[arg-type]
        copied = copy.deepcopy({"weight": shard})
    assert copied["weight"].placements == shard.placements


def test_saving_by_the_strategy_is_left_alone(fake_mesh) -> None:
    found = torch.load(saved(lying(fake_mesh, Shard(0)), is_inside=True), weights_only=False)
    assert isinstance(found, DTensor)
