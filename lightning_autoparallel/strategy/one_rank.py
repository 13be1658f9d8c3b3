"""``OneRankStrategy``: AutoParallelStrategy as rank 0 of a world of which there is nobody else."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch.distributed as dist

from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.cost import hardware_from
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.lightning_compat import ClusterEnvironment, data_connector
from lightning_autoparallel.mesh import build_mesh
from lightning_autoparallel.pipeline import ControlGroup
from lightning_autoparallel.strategy.strategy import AutoParallelStrategy
from lightning_autoparallel.torch_compat.collectives import init_fake_world


class OneRankStrategy(AutoParallelStrategy):
    """Rank 0 of a fake world in this process; collectives move nothing.

    Args:
        world_size: ranks of the fake world.
        ranks_per_node: ranks of one node; None stands for those that the rates of ``hardware`` were measured with.
        options: arguments of AutoParallelStrategy.

    Raises:
        ConfigError: an argument is wrong, or the mesh does not fit ``world_size``.
    """

    def __init__(self, *, world_size: int, ranks_per_node: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._world_size, self._ranks_per_node = world_size, ranks_per_node
        is_known = ranks_per_node is not None or self.config.hardware is not None  # hardware may be told later
        _count_nodes(world_size, self.ranks_per_node if is_known else 1)
        self.spec = _fitted(self.spec, world_size)

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one node of the fake world."""
        if self._ranks_per_node is not None:
            return self._ranks_per_node
        return hardware_from("h100" if self.config.hardware is None else self.config.hardware).ranks_per_node

    def predict_for(self, hardware: str | Mapping[str, Any]) -> None:
        """Predict times for this hardware, whatever the strategy's arguments say.

        Raises:
            ConfigError: it is not known.
        """
        hardware_from(hardware)
        self.config = dataclasses.replace(self.config, hardware=hardware)

    @property
    def world_size(self) -> int:
        """Ranks of the fake world."""
        return self._world_size

    def _configure_launcher(self) -> None:
        """There is nothing to start."""

    def setup_environment(self) -> None:
        """Make the fake world and its mesh."""
        self.config = dataclasses.replace(self.config, ranks_per_node=self.ranks_per_node)
        init_fake_world(self._world_size)
        self._mesh = build_mesh(self.spec, self.root_device.type)
        self._control = ControlGroup(self.timeout)
        super().setup_environment()

    def set_world_ranks(self) -> None:
        """This process, among as many as the fake world has.

        Raises:
            ConfigError: a launcher has started this process beside others.
        """
        _check_first(self.cluster_environment)
        super().set_world_ranks()
        self.num_nodes = _count_nodes(self._world_size, self.ranks_per_node)
        assert self.cluster_environment is not None
        self.cluster_environment.set_world_size(self._world_size)

    def barrier(self, name: str | None = None) -> None:
        """Nobody else is there."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """This process's own object: it stands for every rank."""
        return obj


def check_no_world(what: str) -> None:
    """``what`` makes a fake world, in a process that has none.

    Raises:
        ConfigError: it has one.
    """
    if dist.is_initialized():
        raise ConfigError(
            f"{what} makes a fake world of its own, but a process group is initialised in this process: destroy it "
            f"first (torch.distributed.destroy_process_group), or do it in another process"
        )


def _check_first(environment: ClusterEnvironment | None) -> None:
    rank = 0 if environment is None else max(environment.global_rank(), environment.local_rank())
    if rank:
        raise ConfigError(
            f"this is process {rank} of those that a launcher has started, and a world of one process stands for all "
            "ranks here: start the command once, without torchrun or srun and without RANK and LOCAL_RANK of theirs"
        )


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Around what a Trainer does: it makes no gloo group around ``prepare_data``, which would wait for other ranks.

    The fake world ends with it.
    """
    try:
        with mock.patch.object(data_connector, "_InfiniteBarrier", contextlib.nullcontext):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _fitted(spec: MeshSpec, world_size: int) -> MeshSpec:
    known = math.prod(size for size in spec.sizes if size != -1)
    is_open = -1 in spec.sizes
    if world_size % known or (world_size != known and not is_open):
        needed = f"a multiple of {known}" if is_open else known
        raise ConfigError(f"mesh {spec} needs {needed} ranks, but world_size={world_size}: change one of them")
    return spec.resolve(world_size)


def _count_nodes(world_size: int, ranks_per_node: int) -> int:
    if world_size < 1 or ranks_per_node < 1:
        raise ConfigError(f"world_size={world_size} and ranks_per_node={ranks_per_node} must both be at least 1")
    if world_size > ranks_per_node and world_size % ranks_per_node:
        raise ConfigError(
            f"world_size={world_size} does not fill nodes of ranks_per_node={ranks_per_node}: make it a multiple, or "
            "give other ranks_per_node"
        )
    return max(1, world_size // ranks_per_node)
