"""Files are read where they lie: what is cut into shards stays on the disk, what may be kept does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_autoparallel.checkpoint import Location, can_be_mapped, load_full_optimizer_state, read_file, write_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A checkpoint of a layer, its optimizer and a callback that keeps a tensor."""
    whole = {
        "state_dict": {"weight": torch.ones(5000)},
        "optimizer_states": [_stepped(2.0).state_dict()],
        "callbacks": {"Kept": {"best": torch.full((3,), 4.0)}},
        "epoch": 7,
    }
    path = tmp_path / "whole.ckpt"
    write_file(whole, Location(path))
    return path


def _stepped(grad: float) -> torch.optim.Optimizer:
    layer = nn.Linear(5000, 1, bias=False)
    optimizer = torch.optim.Adam(layer.parameters(), betas=(0.0, 0.0))
    layer.weight.grad = torch.full_like(layer.weight, grad)
    optimizer.step()
    return optimizer


def _zero(path: Path) -> None:
    """Overwrite the file where it lies, as no writer of ours does: who still reads it sees zeros."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(size))


def test_what_is_cut_stays_on_the_disk_and_what_callbacks_keep_does_not(file: Path) -> None:
    checkpoint = read_file(Location(file), None)
    _zero(file)
    assert checkpoint["epoch"] == 7
    assert checkpoint["callbacks"]["Kept"]["best"].tolist() == [4.0] * 3
    assert not checkpoint["state_dict"]["weight"].any()


def test_an_optimizer_that_has_loaded_needs_the_file_no_more(file: Path) -> None:
    optimizer = _stepped(3.0)
    load_full_optimizer_state(optimizer, read_file(Location(file), None)["optimizer_states"][0])
    _zero(file)
    (state,) = optimizer.state.values()
    assert state["exp_avg"].unique().tolist() == [2.0]


def test_files_of_the_layout_before_1_6_are_left_to_lightning(tmp_path: Path) -> None:
    old: Any = tmp_path / "old.ckpt"
    torch.save({"state_dict": {}}, old, _use_new_zipfile_serialization=False)
    assert not can_be_mapped(Location(old))


def test_what_is_elsewhere_or_a_folder_is_not_mapped(tmp_path: Path) -> None:
    assert not can_be_mapped(Location("memory://there/whole.ckpt"))
    assert not can_be_mapped(Location(tmp_path))
    assert not can_be_mapped(Location(tmp_path / "nothing.ckpt"))
