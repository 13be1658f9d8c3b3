"""Lightning's strategies on the batches of this one: the same rows in every step, whatever the mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from lightning_autoparallel.capture import describe_batch, flatten_batch
from lightning_autoparallel.cli.bench.measurements import Kind
from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.lightning_compat import DDPStrategy, ModelParallelStrategy, ParallelStrategy


@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """The config's dataloaders give ``shards`` different batches a step; ``parts`` processes share each of them.

    Under this strategy the processes that share a batch are those along axes such as ``tp``. Strategies without these
    axes give each of them a part of its rows: what all processes see together stays the same.
    """

    shards: int
    parts: int
    batch_dims: Mapping[str, int | None] | None = None

    @classmethod
    def of(cls, mesh: MeshSpec, batch_dims: Mapping[str, int | None] | None = None) -> RowSplit:
        """The split of a resolved mesh."""
        shards = math.prod(size for name, size in mesh.axes if name.startswith("dp_"))
        return cls(shards=shards, parts=math.prod(mesh.sizes) // shards, batch_dims=batch_dims)

    def sampler(self, rank: int) -> dict[str, int]:
        """Arguments of the distributed sampler of process ``rank``."""
        return {"num_replicas": self.shards, "rank": rank // self.parts}

    def rows(self, batch: Any, rank: int) -> Any:
        """The rows of ``batch`` that process ``rank`` computes: its part of dim 0 of every batched tensor.

        Raises:
            ConfigError: the rows do not divide.
        """
        if self.parts == 1:
            return batch
        leaves, rebuild = flatten_batch(batch)
        layout = describe_batch(leaves, self.batch_dims)
        parts = [
            self._part(value, rank % self.parts) if leaf.batched else value
            for leaf, (_, value) in zip(layout.leaves, leaves, strict=True)
        ]
        return rebuild(parts)

    def _part(self, value: torch.Tensor, part: int) -> torch.Tensor:
        count, rest = divmod(len(value), self.parts)
        if rest or not count:
            raise ConfigError(
                f"a batch of {len(value)} rows does not divide by {self.parts}: the mesh has {self.shards} batch "
                f"shards on {self.shards * self.parts} processes, and DDP and FSDP2 give every process rows of its "
                f"own; make the batch size a multiple of {self.parts}, or leave out --against"
            )
        return value[part * count : (part + 1) * count]


class _SameRows(ParallelStrategy):
    """Takes its rows as a RowSplit says."""

    row_split = RowSplit(shards=1, parts=1)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Processes that share a batch read the same one."""
        return self.row_split.sampler(self.global_rank)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """This process's rows, on its device."""
        return self.row_split.rows(super().batch_to_device(batch, device, dataloader_idx), self.global_rank)


class _DDP(_SameRows, DDPStrategy):
    pass


class _FSDP2(_SameRows, ModelParallelStrategy):
    pass


def lightning_strategy(kind: Kind, split: RowSplit, backend: str | None, timeout: timedelta) -> ParallelStrategy:
    """Lightning's DDPStrategy, or its ModelParallelStrategy with all processes on the data-parallel axis."""
    strategy: _SameRows
    if kind == "ddp":
        strategy = _DDP(process_group_backend=backend, timeout=timeout)
    else:
        world_size = split.shards * split.parts
        strategy = _FSDP2(
            data_parallel_size=world_size, tensor_parallel_size=1, process_group_backend=backend, timeout=timeout
        )
    strategy.row_split = split
    return strategy
