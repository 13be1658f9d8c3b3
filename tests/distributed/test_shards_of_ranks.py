"""Shards that rank 0 makes whole while it writes a file, on four ranks, whatever their mesh and placements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from lightning_autoparallel.apply import gathered
from lightning_autoparallel.checkpoint import Location, ShardsOfRanks, write_file
from lightning_autoparallel.errors import CheckpointError
from tests.support.worlds import Worlds

ONE_AXIS, TWO_AXES = (4,), (2, 2)
PLACED = {
    "even rows": (ONE_AXIS, (8, 3), [Shard(0)]),
    "uneven rows": (ONE_AXIS, (7, 3), [Shard(0)]),
    "fewer rows than ranks": (ONE_AXIS, (2, 3), [Shard(0)]),
    "columns": (ONE_AXIS, (3, 5), [Shard(1)]),
    "nowhere": (ONE_AXIS, (0, 3), [Shard(0)]),
    "everywhere": (TWO_AXES, (5,), [Replicate(), Replicate()]),
    "number": (ONE_AXIS, (), [Replicate()]),
    "copies of rows": (TWO_AXES, (5, 3), [Replicate(), Shard(0)]),
    "rows of copies": (TWO_AXES, (5, 3), [Shard(0), Replicate()]),
    "blocks": (TWO_AXES, (5, 3), [Shard(0), Shard(1)]),
    "rows twice": (TWO_AXES, (9, 2), [Shard(0), Shard(0)]),
    "strided": (TWO_AXES, (8, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
}
DTYPES = (torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)


def values(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) + 1


def whole() -> dict[str, Tensor]:
    found = {name: values(shape) for name, (_, shape, _) in PLACED.items()}
    return {**found, **{str(dtype): values((5, 2)).to(dtype) for dtype in DTYPES}}


def checkpoint() -> dict[str, Any]:
    meshes = {shape: init_device_mesh("cpu", shape) for shape in (ONE_AXIS, TWO_AXES)}
    state = {}
    for name, tensor in whole().items():
        mesh, _, placements = PLACED.get(name, PLACED["uneven rows"])
        state[name] = distribute_tensor(tensor, meshes[mesh], placements, src_data_rank=None)
    state["again"] = state["uneven rows"].detach()
    square = distribute_tensor(values((4, 4)), meshes[ONE_AXIS], [Replicate()], src_data_rank=None)
    state |= {"square": square, "turned": square.t()}
    # rank 0 alone has parts of these, of one buffer; others have two empty ones at one place
    flat = values((2,)) if dist.get_rank() == 0 else values((0,))
    ends = flat.split(1) if dist.get_rank() == 0 else (flat, flat)
    first, second = (
        DTensor.from_local(end, meshes[ONE_AXIS], [Shard(0)], shape=torch.Size([1]), stride=(1,)) for end in ends
    )
    others = {"others": [1, "two"], "first": first, "second": second}
    return {"state": state, "plain": values((3,)), **others}


def save(path: str, copies: bool) -> None:
    given = checkpoint()
    shards = ShardsOfRanks(dist.group.WORLD)
    taken = shards.taken_out_of(given)
    assert not any(isinstance(value, DTensor) for value in taken["state"].values())
    if copies:
        shards.copy()
        for tensor in given["state"].values():
            tensor.to_local().zero_()
    shards.written_by(lambda: write_file(taken, Location(path)))


@pytest.mark.parametrize("copies", [False, True])
def test_a_file_holds_whole_tensors(copies: bool, worlds: Worlds, tmp_path: Path) -> None:
    path = str(tmp_path / "file.ckpt")
    worlds(4).run(save, path, copies)
    found = torch.load(path, weights_only=True)
    state = found.pop("state")
    assert found["others"] == [1, "two"]
    assert torch.equal(found["plain"], values((3,)))
    for name, tensor in whole().items():
        assert (state[name].dtype, state[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(state[name].float(), tensor.float()), (name, state[name], tensor)
    assert state["again"].data_ptr() == state["uneven rows"].data_ptr()
    assert torch.equal(state["turned"], values((4, 4)).t())
    assert found["first"].tolist() == [1.0] and found["second"].tolist() == [2.0]


def fails(path: str) -> str:
    given = checkpoint()
    shards = ShardsOfRanks(dist.group.WORLD)
    taken = shards.taken_out_of(given)

    def write() -> None:
        torch.save({"first": taken["state"]["blocks"]}, path)
        raise OSError("No space left on device")

    try:
        shards.written_by(write)
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_all_ranks_hear_that_it_could_not_be_written(worlds: Worlds, tmp_path: Path) -> None:
    first, *others = worlds(4).run(fails, str(tmp_path / "file.ckpt"))
    assert first == "OSError: No space left on device"
    assert others == [f"rank 0 has failed: {first}"] * 3


def has_more(path: str) -> str:
    given = checkpoint()
    if dist.get_rank() == 2:
        given["more"] = given["state"]["columns"] + 1
    shards = ShardsOfRanks(dist.group.WORLD)
    taken = shards.taken_out_of(given)
    try:
        shards.written_by(lambda: torch.save(taken, path))
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_ranks_that_hold_other_shards_do_not_wait_for_each_other(worlds: Worlds, tmp_path: Path) -> None:
    for text in worlds(4).run(has_more, str(tmp_path / "file.ckpt")):
        assert "other sharded tensors into it, by rank [20, 20, 21, 20]" in text
    assert not (tmp_path / "file.ckpt").exists()


def kept() -> list[Any]:
    given = {name: checkpoint()["state"][name] for name in ("uneven rows", "strided")}
    return list(gathered({"state": given, "plain": values((2,))}, keep=dist.get_rank() == 0)["state"].values())


def test_ranks_that_do_not_keep_what_is_gathered_hold_nothing(worlds: Worlds) -> None:
    first, *others = worlds(4).run(kept)
    for found, name in zip(first, ("uneven rows", "strided"), strict=True):
        assert torch.equal(found, whole()[name])
    assert others == [[None, None]] * 3
