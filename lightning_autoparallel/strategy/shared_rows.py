"""Ranks that compute parts of one batch shard start a step from the same rows and the same random numbers.

Loaders, samplers and hooks run on every rank by themselves. What they draw differs where one rank draws more (a preview
on rank 0), or where nobody has seeded numpy. One device has one generator of a kind: the others follow that of the
shard's first rank.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autoparallel.capture import flatten_batch
from lightning_autoparallel.fx.values import fingerprint
from lightning_autoparallel.pipeline import ControlGroup
from lightning_autoparallel.pipeline.agreement import other_place, other_rows, rows_apart
from lightning_autoparallel.strategy.generators_of_rank import Generators

_NUMBERS = (bool, int, float, complex, np.generic)
Rows = Mapping[str, str]  # digests of a batch's leaves by path


class SharedRows:
    """What the ranks of one batch shard have in common; ``control`` knows who they are."""

    def __init__(self, control: ControlGroup, device: torch.device, warn: Callable[[str], None]) -> None:
        self._control = control
        self._generators = Generators(device)
        self._warn = warn
        self._seen: set[str] = set()

    def begin(self) -> None:
        """A run begins: loaders may be others than in the last one."""
        self._seen.clear()
        self.follow_generators()

    def follow_generators(self) -> None:
        """Python's generator, numpy's and torch's go on where those of the shard's first rank stand; ranks meet.

        Raises:
            OtherRankError: ranks have come to different places.
        """
        if not self._are_alike("random numbers", self._generators.spelled()):
            self._generators.set(self._control.told_by_first_of_shard(self._generators.states()))

    def follow(self, generators: Sequence[torch.Generator]) -> None:
        """The same of generators that a loader was given.

        Raises:
            OtherRankError: ranks have come to different places.
        """
        if not generators:
            return
        states = [generator.get_state() for generator in generators]
        spelled = " ".join(fingerprint(state) for state in states)
        if not self._are_alike(f"random numbers of a loader's {len(states)} generators", spelled):
            told = self._control.told_by_first_of_shard(states)
            for generator, state in zip(generators, told, strict=True):
                generator.set_state(state)

    def _are_alike(self, place: str, spelled: str) -> bool:
        alike = self._control.agrees_in_shards(place, spelled)
        if alike is None:
            raise other_place(self._control.gather(place))
        return alike

    @contextlib.contextmanager
    def followed_behind(self, hook: str) -> Iterator[None]:
        """Around a hook of the Trainer's: samplers draw behind what has drawn in those of an epoch's start."""
        yield
        if hook == "on_train_epoch_start":
            self.follow_generators()

    def same(self, loader: str, batch: Any) -> Any:
        """This rank's ``batch`` with the rows of the shard's first rank; all ranks have one of the ``loader`` alike.

        Raises:
            ConfigError: all that ranks have in the loader's first batch differs: it was not made for this mesh.
            OtherRankError: ranks have come to different places.
        """
        place, rows, drawn = f"a batch of the {loader}", _spelled(batch), self._generators.spelled()
        alike = self._control.agrees_in_shards(place, f"{rows} {drawn}")
        is_first = loader not in self._seen
        self._seen.add(loader)
        if alike:
            return batch
        everyone = self._control.gather((place, rows, drawn))
        if alike is None:
            raise other_place([told[0] if isinstance(told, tuple) else told for told in everyone])
        if any(theirs != drawn for _, _, theirs in everyone):
            self._generators.set(self._control.told_by_first_of_shard(self._generators.states()))
        return self._rows_of_first(batch, [theirs for _, theirs, _ in everyone], is_first)

    def _rows_of_first(self, batch: Any, everyone: list[Rows], is_first: bool) -> Any:
        shards, rank = self._control.shards, dist.get_rank()
        apart = rows_apart(list(zip(shards, everyone, strict=True)))
        if apart is None:
            return batch
        first_of = [shards.index(shard) for shard in shards]
        pairs = [(everyone[first], theirs) for first, theirs in zip(first_of, everyone, strict=True)]
        is_needed = {first for first, (expected, theirs) in zip(first_of, pairs, strict=True) if theirs != expected}
        packed = _packed(batch) if rank in is_needed else b""
        if self._control.any([packed is None])[0] or (is_first and any(_all_differ(*pair) for pair in pairs)):
            raise other_rows(apart)
        self._warn(
            f"autoparallel: {apart}. The rows of the shard's first rank are taken, here and wherever they differ later"
        )
        if first_of[rank] not in is_needed:
            return batch
        told = self._control.told_by_first_of_shard(packed)
        return batch if everyone[rank] == everyone[first_of[rank]] else pickle.loads(told)


def _all_differ(expected: Rows, theirs: Rows) -> bool:
    return bool(expected) and all(theirs.get(path) != value for path, value in expected.items())


def _spelled(batch: Any) -> Rows:
    """Of what a step computes with; of texts only where there is nothing else: a path may be a host's own."""
    leaves, _ = flatten_batch(batch)
    found = {path: text for path, leaf in leaves if (text := _spelled_leaf(leaf))}
    return dict(sorted((found or {path: leaf for path, leaf in leaves if isinstance(leaf, str)}).items()))


def _spelled_leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        is_plain = leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_meta)
        return f"{leaf.dtype} {tuple(leaf.shape)} {fingerprint(leaf)}" if is_plain else ""
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype} {leaf.shape} {fingerprint(leaf)}" if leaf.dtype.kind in "biufc" else ""
    return repr(leaf) if isinstance(leaf, _NUMBERS) else ""


def _packed(batch: Any) -> bytes | None:
    """The whole batch for others to read, of views no more than they show; None where it cannot be packed."""
    leaves, rebuild = flatten_batch(batch)
    on_host = {id(leaf): leaf.detach().cpu().clone() for _, leaf in leaves if isinstance(leaf, Tensor)}
    try:
        return pickle.dumps(rebuild([on_host.get(id(leaf), leaf) for _, leaf in leaves]))
    except (pickle.PicklingError, TypeError, AttributeError):
        return None
