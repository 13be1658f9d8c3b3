"""User code finds another default group, by whatever function of ``torch.distributed``; torch's own does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.distributed.device_mesh import init_device_mesh

from lightning_autoparallel.torch_compat.collectives import init_fake_world
from lightning_autoparallel.torch_compat.users_world import joins_told, users_world

RANKS, SHARDS = 4, 2


@pytest.fixture
def shards() -> Iterator[dist.ProcessGroup]:
    """A group of two of the ranks of a fake world."""
    init_fake_world(RANKS)
    group = dist.new_group([0, 2])
    assert isinstance(group, dist.ProcessGroup)
    yield group
    dist.destroy_process_group()


def parts(count: int = SHARDS) -> list[torch.Tensor]:
    return [torch.zeros(3) for _ in range(count)]


JOINS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(torch.zeros(3)),
    "reduce": lambda: dist.reduce(torch.zeros(3), dst=0),
    "all_gather": lambda: dist.all_gather(parts(dist.get_world_size()), torch.zeros(3)),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(
        torch.zeros(3 * dist.get_world_size()), torch.zeros(3)
    ),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(3 * dist.get_world_size())),
    "all_to_all_single": lambda: dist.all_to_all_single(torch.zeros(8), torch.zeros(8)),
    "differentiable": lambda: torch.distributed.nn.functional.all_reduce(torch.zeros(3)),
    "asynchronous": lambda: dist.all_reduce(torch.zeros(3), async_op=True),
}


@pytest.mark.parametrize("name", JOINS)
def test_collectives_without_a_group_ask_for_the_users(name: str, shards: dist.ProcessGroup) -> None:
    asked: list[None] = []
    with users_world(shards, lambda: asked.append(None)):
        JOINS[name]()
    assert asked


@pytest.mark.parametrize("name", JOINS)
def test_joins_over_all_are_told(name: str, shards: dist.ProcessGroup) -> None:
    told: list[str] = []
    with joins_told(told.append):
        JOINS[name]()
        dist.barrier()
        dist.broadcast(torch.zeros(3), src=0)
        dist.all_reduce(torch.zeros(3), group=shards)
    assert set(told) == {name if name in vars(dist) else "all_reduce"}


def test_ranks_are_the_users_inside_alone(shards: dist.ProcessGroup) -> None:
    asked: list[None] = []
    with users_world(shards, lambda: asked.append(None)):
        assert (dist.get_world_size(), dist.get_rank()) == (SHARDS, 0) and len(asked) > 0
        assert dist.group.WORLD is shards and dist.is_initialized()
    assert dist.get_world_size() == RANKS and dist.group.WORLD is not shards


def test_compiled_code_finds_what_code_does(shards: dist.ProcessGroup) -> None:
    @torch.compile(backend="eager")
    def share(value: torch.Tensor) -> torch.Tensor:
        return value / dist.get_world_size()

    with users_world(shards, lambda: None):
        assert share(torch.ones(1)) == 1 / SHARDS


def test_meshes_are_of_all_ranks(shards: dist.ProcessGroup) -> None:
    with users_world(shards, lambda: None):
        assert init_device_mesh("cpu", (RANKS,)).size() == RANKS


def test_an_error_leaves_the_world_as_it_was(shards: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match="mine"), users_world(shards, lambda: None):
        raise ValueError("mine")
    assert dist.get_world_size() == RANKS


def test_a_name_of_the_users_own_is_no_argument(shards: dist.ProcessGroup) -> None:
    group = dist.group.WORLD
    with users_world(shards, lambda: None):
        assert dist.group.WORLD is shards is not group
