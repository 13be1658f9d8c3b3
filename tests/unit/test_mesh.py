"""The mesh of a fake world: which ranks share a communicator, as each rank sees it."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.mesh import build_mesh
from lightning_autoparallel.torch_compat.collectives import init_fake_world

AXES = {"dp_replicate": 2, "dp_shard": 3, "tp": 2}
NAMES = tuple(AXES)
SUBSETS = [axes for count in (1, 2, 3) for axes in itertools.combinations(NAMES, count)]


def expected_ranks(axes: tuple[str, ...], rank: int) -> list[int]:
    """Ranks that differ from ``rank`` in ``axes`` only, outer axes slowest: from coordinates, without torch's mesh."""
    sizes = [AXES[name] for name in NAMES]
    coordinates = [int(i) for i in torch.unravel_index(torch.tensor(rank), tuple(sizes))]
    ranges = [range(sizes[i]) if name in axes else [coordinates[i]] for i, name in enumerate(NAMES)]
    strides = [sizes[1] * sizes[2], sizes[2], 1]
    return [sum(c * s for c, s in zip(place, strides, strict=True)) for place in itertools.product(*ranges)]


@pytest.mark.parametrize("rank", [0, 7, 11])
def test_every_ascending_subset_is_one_communicator(fake_mesh, rank: int):
    mesh = fake_mesh(rank=rank, **AXES)
    assert set(mesh.submeshes) == set(SUBSETS)
    for axes in SUBSETS:
        ranks = expected_ranks(axes, rank)
        assert dist.get_process_group_ranks(mesh.submesh(axes).get_group()) == ranks
        axis = mesh.plan_axis(axes)
        assert (axis.mesh_axes, axis.size, axis.rank) == (axes, len(ranks), ranks.index(rank))
        assert axis.name == ",".join(axes)


def test_groups_are_named_by_their_axes(fake_mesh):
    mesh = fake_mesh(**AXES)
    named = mesh.axes_by_group()
    assert sorted(named.values()) == sorted(",".join(axes) for axes in SUBSETS)
    assert all(named[mesh.plan_axis(axes).group_name] == ",".join(axes) for axes in SUBSETS)


@pytest.mark.parametrize("rank", [0, 7, 11])
def test_a_group_in_another_order_is_made_once_it_is_to_be_used(fake_mesh, rank: int):
    mesh = fake_mesh(rank=rank, **AXES)
    before = set(mesh.axes_by_group())
    axes = [mesh.plan_axis((name,)) for name in ("tp", "dp_shard")]
    axis = mesh.ordered_axis(axes)
    ranks = expected_ranks(("dp_shard", "tp"), rank)
    ranks = [*ranks[0::2], *ranks[1::2]]  # all of the first half of tp, then all of the second
    assert axis.group_name not in mesh.groups
    mesh.make_groups({axis.group_name, "another's"})
    assert axis.group_name in mesh.groups
    assert dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(axis.group_name)) == ranks
    again = build_mesh(MeshSpec.from_mapping(AXES), "cpu")  # of the same ranks: there is such a group
    assert again.ordered_axis(axes) == axis
    again.make_groups({axis.group_name})
    assert (axis.mesh_axes, axis.size, axis.rank) == (("tp", "dp_shard"), 6, ranks.index(rank))
    assert mesh.ordered_axis(axes) is axis
    assert {group: mesh.axes_by_group()[group] for group in set(mesh.axes_by_group()) - before} == {
        axis.group_name: "tp,dp_shard"
    }


def test_the_meshs_own_order_needs_no_group_of_its_own(fake_mesh):
    mesh = fake_mesh(**AXES)
    inner = mesh.plan_axis(("dp_shard", "tp"))
    assert mesh.ordered_axis([mesh.plan_axis(("dp_replicate",)), inner]) == mesh.plan_axis(NAMES)
    assert not mesh.ordered


def test_axes_of_one_process_never_communicate(fake_mesh):
    mesh = fake_mesh(rank=3, dp_replicate=1, dp_shard=4, tp=1)
    assert mesh.active(mesh.spec.names) == ("dp_shard",)
    assert mesh.plan_axis(("tp",)) is None
    assert mesh.plan_axis(("dp_replicate", "dp_shard")) == mesh.plan_axis(("dp_shard",))
    assert mesh.submesh(("dp_replicate", "dp_shard", "tp")) is mesh.submeshes[("dp_shard",)]
    assert mesh.submesh(("tp",)).size() == 1


def test_the_batch_is_sharded_by_the_dp_axes(fake_mesh):
    mesh = fake_mesh(rank=9, **AXES)
    assert mesh.data_parallel_axes == ("dp_replicate", "dp_shard")
    assert mesh.data_parallel_size == 6
    assert mesh.data_parallel_rank == 9 // AXES["tp"]
    assert mesh.sizes == AXES


def test_a_single_process_has_one_shard(fake_mesh):
    mesh = fake_mesh(dp_shard=1)
    assert (mesh.data_parallel_size, mesh.data_parallel_rank) == (1, 0)


def test_tp_alone_shards_no_batch(fake_mesh):
    mesh = fake_mesh(rank=1, tp=2)
    assert mesh.data_parallel_axes == ()
    assert (mesh.data_parallel_size, mesh.data_parallel_rank) == (1, 0)


def test_a_size_that_does_not_fit_is_refused(fake_mesh):
    init_fake_world(4)
    with pytest.raises(ConfigError, match="needs 2 processes, Trainer started 4"):
        build_mesh(MeshSpec.from_mapping({"dp_shard": 2}), "cpu")
