"""Ranks that compute parts of one batch shard start a step from the same rows and the same random numbers.

Loaders, samplers and hooks run on every rank by themselves. What they draw differs where one rank draws more (a preview
on rank 0), or where nobody has seeded numpy. One device has one generator of a kind: the others follow that of the
shard's first rank.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autoparallel.capture import flatten_batch
from lightning_autoparallel.fx.values import fingerprint
from lightning_autoparallel.pipeline import ControlGroup
from lightning_autoparallel.pipeline.agreement import other_place, other_rows, rows_apart
from lightning_autoparallel.torch_compat.generators import generator_state, set_generator_state

T = TypeVar("T")
States = tuple[Any, Any, list[Tensor]]  # of Python's generator, numpy's, and torch's on each device
_HOST = torch.device("cpu")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class SharedRows:
    """What the ranks of one batch shard have in common; ``control`` knows who they are."""

    def __init__(self, control: ControlGroup, device: torch.device, warn: Callable[[str], None]) -> None:
        self._control = control
        self._devices = (_HOST,) if device.type == "cpu" else (_HOST, device)
        self._warn = warn
        self._seen: set[str] = set()

    def follow_generators(self) -> None:
        """Python's generator, numpy's and torch's go on where those of the shard's first rank stand; ranks meet."""
        if not self._control.agrees_in_shards("generators", self._drawn):
            self._take_generators()

    def same(self, loader: str, batch: Any) -> Any:
        """This rank's ``batch`` with the rows of the shard's first rank; all ranks have one of the ``loader`` alike.

        Raises:
            ConfigError: they differ in the loader's first batch: it was not made for this mesh.
            OtherRankError: ranks have come to different places.
        """
        leaves, rebuild = flatten_batch(batch)
        rows, drawn = {path: _spelled(leaf) for path, leaf in leaves}, self._drawn
        alike = self._control.agrees_in_shards(f"a batch of {loader}", f"{rows} {drawn}")
        is_first = loader not in self._seen
        self._seen.add(loader)
        if alike:
            return batch
        everyone = self._control.gather((f"a batch of {loader}", rows, drawn))
        if alike is None:
            raise other_place(everyone)
        if not self._same_in_shards([theirs for _, _, theirs in everyone]):
            self._take_generators()
        apart = rows_apart(list(zip(self._control.shards, [theirs for _, theirs, _ in everyone], strict=True)))
        if apart is None:
            return batch
        if is_first:
            raise other_rows(apart)
        self._warn(
            f"autoparallel: {apart}, though their first batch was the same. The shard's first rank has the rows that "
            "are taken, here and wherever they differ later"
        )
        first = self._of_first([(path, _on_host(leaf)) for path, leaf in leaves])
        if [path for path, _ in first] != list(rows):
            return batch  # of another structure, which is refused by its name
        return rebuild([_moved(theirs, leaf) for (_, theirs), (_, leaf) in zip(first, leaves, strict=True)])

    @property
    def _drawn(self) -> str:
        """Where the generators stand, in few characters."""
        return _spelled_states(_states(self._devices))

    def _take_generators(self) -> None:
        _set_states(self._of_first(_states(self._devices)), self._devices)

    def _same_in_shards(self, values: Sequence[T]) -> bool:
        return all(values[first] == value for first, value in zip(self._firsts, values, strict=True))

    def _of_first(self, value: T) -> T:
        """What the first rank of this rank's shard has."""
        rank, firsts = dist.get_rank(), self._firsts
        told = self._control.gather(value if firsts[rank] == rank else None)
        return told[firsts[rank]]

    @property
    def _firsts(self) -> list[int]:
        """The first rank of each rank's shard."""
        return [self._control.shards.index(shard) for shard in self._control.shards]


def _spelled(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} {fingerprint(leaf)}" if _is_plain(leaf) else ""
    return repr(leaf) if type(leaf) in _PLAIN else ""


def _on_host(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf if type(leaf) in _PLAIN else None


def _moved(theirs: Any, mine: Any) -> Any:
    if isinstance(mine, Tensor):
        return theirs.to(mine.device) if isinstance(theirs, Tensor) and _is_plain(mine) else mine
    return theirs if type(mine) in _PLAIN else mine


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _states(devices: Sequence[torch.device]) -> States:
    return random.getstate(), np.random.get_state(), [generator_state(device) for device in devices]


def _set_states(states: States, devices: Sequence[torch.device]) -> None:
    python, arrays, tensors = states
    random.setstate(python)
    np.random.set_state(arrays)
    for device, state in zip(devices, tensors, strict=True):
        set_generator_state(device, state)


def _spelled_states(states: States) -> str:
    (version, words, gauss), (kind, keys, *rest), tensors = states
    found = hashlib.blake2b(repr((version, gauss, kind, rest)).encode(), digest_size=8)
    for values in (array("Q", words), keys, *(state.numpy() for state in tensors)):
        found.update(values.tobytes())
    return found.hexdigest()
