"""Files are written on this machine's disks, and nowhere else without a word."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_autoparallel.checkpoint import (
    Location,
    load_full_model_state,
    load_full_optimizer_state,
    read_file,
    write_file,
)
from lightning_autoparallel.errors import CheckpointError


def test_a_file_elsewhere_is_refused() -> None:
    there = Location("memory://bucket/whole.ckpt")
    with pytest.raises(CheckpointError, match="is not on this machine's disks"):
        write_file({}, there)
    assert not there.exists()


class Keeping(nn.Linear):
    """Keeps what it is given, as metrics do, and its weight, too."""

    kept = torch.zeros(4)

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *others: Any) -> None:
        super()._load_from_state_dict(state, prefix, *others)
        self.weight = nn.Parameter(state[f"{prefix}weight"])

    def get_extra_state(self) -> Tensor:
        return self.kept

    def set_extra_state(self, state: Tensor) -> None:
        self.kept = state


def trained() -> tuple[Keeping, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = Keeping(4, 2)
    module.kept = torch.rand(4)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(4)).sum().backward()
    optimizer.step()
    return module, optimizer


def tensors_of(module: Keeping, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = itertools.chain.from_iterable(state.values() for state in optimizer.state.values())
    return [*module.parameters(), module.kept, *states]


def test_what_was_read_stays_when_the_file_changes(tmp_path: Path) -> None:
    module, optimizer = trained()
    path, seen = str(tmp_path / "whole.ckpt"), torch.rand(3)
    state = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()], "callback": {"a": seen}}
    write_file(state, Location(path))
    checkpoint = read_file(Location(path), weights_only=True)
    assert checkpoint is not None

    other = Keeping(4, 2)
    load_full_model_state(other, checkpoint["state_dict"], strict=True, on_disk=True)
    its_optimizer = torch.optim.AdamW(other.parameters())
    load_full_optimizer_state(its_optimizer, checkpoint["optimizer_states"][0], on_disk=True)
    with open(path, "r+b") as file:
        file.write(bytes(Path(path).stat().st_size))
    assert not checkpoint["state_dict"]["weight"].any()  # it stayed on the disk
    for read, written in zip(tensors_of(other, its_optimizer), tensors_of(module, optimizer), strict=True):
        assert torch.equal(read, written)
    assert torch.equal(checkpoint["callback"]["a"], seen)


def test_tensors_without_a_memory(tmp_path: Path) -> None:
    module, location = nn.Linear(2, 2), Location(tmp_path / "sparse.ckpt")
    module.register_buffer("adjacency", torch.eye(3).to_sparse())
    write_file({"state_dict": module.state_dict()}, location)
    checkpoint = read_file(location, weights_only=True)
    assert checkpoint is not None
    module.adjacency = torch.zeros(3, 3).to_sparse()
    load_full_model_state(module, checkpoint["state_dict"], strict=True, on_disk=True)
    assert torch.equal(module.adjacency.to_dense(), torch.eye(3))


@pytest.mark.parametrize("weights_only", [True, None])
def test_a_file_of_an_old_layout_is_read_by_others(weights_only: bool | None, tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    torch.save({"state_dict": {}}, path, _use_new_zipfile_serialization=False)
    assert read_file(Location(path), weights_only) is None


def test_of_a_trusted_file_nothing_stays_on_the_disk(tmp_path: Path) -> None:
    state: dict[str, Any] = {"state_dict": {"weight": torch.ones(2)}}
    location = Location(tmp_path / "trusted.ckpt")
    write_file(state, location)
    assert read_file(location, weights_only=False) is None
    assert read_file(location, weights_only=None) is not None
