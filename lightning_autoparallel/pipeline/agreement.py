"""Ranks agree before they talk: small messages on a group of their own, so that a difference is an error, no hang."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_autoparallel.errors import AutoParallelError, CaptureError, ConfigError
from lightning_autoparallel.torch_compat.gloo import one_gloo_thread


@dataclass(frozen=True, kw_only=True)
class StepIdentity:
    """What a rank is about to run; all ranks must be about to run the same."""

    name: str
    batch: str
    shapes: Mapping[str, tuple[int, ...]]  # of the batch's tensors, by path
    values: Mapping[str, str]  # digests of replicated leaves, by path
    variant: int
    module_state: str


class ControlGroup:
    """All ranks on a gloo group apart from the mesh's: nothing the step launches is counted or delayed by it."""

    def __init__(self, timeout: timedelta) -> None:
        # A fake world has one process, which agrees with itself.
        self._alone = dist.get_world_size() == 1 or dist.get_backend() == "fake"
        with one_gloo_thread():
            self._group = None if self._alone else dist.new_group(backend="gloo", timeout=timeout)

    def agrees(self, text: str) -> bool:
        """Whether every rank gave the same text: one all-reduce of 16 bytes."""
        if self._alone:
            return True
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        bounds = torch.tensor([number, -number])
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=self._group)
        return bool(bounds[0] == -bounds[1])

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, by rank."""
        if self._alone:
            return [value]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def raise_together(self, error: Exception | None) -> None:
        """Raise on all ranks if any has an error: its own, or the first other rank's.

        An error that is not ours and that only some ranks have becomes one of ours, so that no rank goes on alone.

        Raises:
            AutoParallelError: some rank has an error.
        """
        if self.agrees("" if error is None else "error") and error is None:
            return
        messages = self.gather(None if error is None else _message(error))
        if error is None:
            rank = next(i for i, message in enumerate(messages) if message is not None)
            raise CaptureError(f"rank {rank} stopped: {messages[rank]}")
        if None in messages and not isinstance(error, AutoParallelError):
            raise CaptureError(f"this rank alone stopped: {_message(error)}") from error
        raise error


def check_same_step(control: ControlGroup, mine: StepIdentity) -> None:
    """Compare what ranks are about to run, before any of them starts a collective.

    Raises:
        ConfigError: they hold batches of different shapes, or different values of a replicated leaf.
        CaptureError: they took different branches, or froze different parameters.
    """
    if control.agrees(repr(mine)):
        return
    everyone: list[StepIdentity] = control.gather(mine)
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        if (theirs.name, theirs.batch) != (first.name, first.batch):
            raise ConfigError(
                f"ranks hold different batches: rank 0 has {first.name} on {first.batch}, rank {rank} has "
                f"{theirs.name} on {theirs.batch}; {_remedy(first.shapes, theirs.shapes)}"
            )
    for rank, theirs in enumerate(everyone):
        for path in [path for path, digest in first.values.items() if theirs.values.get(path) != digest]:
            raise ConfigError(
                f"batch leaf '{path}' has other values on rank {rank} than on rank 0, but its dim 0 is not the batch, "
                f"so it is replicated; give all ranks the same values, or set batch_dims={{'{path}': 0}}"
            )
    raise CaptureError(
        "ranks took different branches of the step, or froze different parameters: they must decide alike"
    )


def _remedy(mine: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]]) -> str:
    """What makes two ranks' batches alike: rows where dim 0 differs, padding where another dim does."""
    if mine.keys() != theirs.keys() or any(len(mine[path]) != len(theirs[path]) for path in mine):
        return "give every rank the same kind of batch"
    pairs = ((path, dim, size, theirs[path][dim]) for path, shape in mine.items() for dim, size in enumerate(shape))
    differing = [item for item in pairs if item[2] != item[3]]
    if not differing or any(dim == 0 for _, dim, _, _ in differing):
        return "give every rank the same number of rows (drop_last=True)"
    path, dim, size, other = differing[0]
    return (
        f"dim {dim} of leaf '{path or 'batch'}' is {size} and {other} long: pad to one length on all ranks "
        "(padding='max_length', or a multiple that all of them reach: pad_to_multiple_of)"
    )


def check_same_rows(control: ControlGroup, shard: int, digests: Mapping[str, str]) -> None:
    """Compare the rows of ranks that share a batch shard: they compute parts of one thing, and must start from one.

    ``shard`` is this rank's batch shard, ``digests`` are those of its batched leaves, by path.

    Raises:
        ConfigError: ranks of one shard hold different rows.
    """
    first_of: dict[int, tuple[int, Mapping[str, str]]] = {}
    for rank, (other, theirs) in enumerate(control.gather((shard, digests))):
        first, expected = first_of.setdefault(other, (rank, theirs))
        for path in [path for path, digest in expected.items() if theirs.get(path) != digest]:
            raise ConfigError(
                f"ranks {first} and {rank} share batch shard {other} but hold different rows in batch leaf "
                f"'{path or 'batch'}': only dp_* axes divide the batch; let the Trainer make the sampler, or give "
                "yours **strategy.distributed_sampler_kwargs and the same seed on every rank"
            )


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, AutoParallelError) else f"{type(error).__name__}: {error}"
