"""Ranks agree before they talk: small messages on a group of their own, so that a difference is an error, no hang."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autoparallel.errors import (
    AutoParallelError,
    CaptureError,
    ConfigError,
    OtherRankError,
    RanksDifferError,
)
from lightning_autoparallel.fx.values import digest
from lightning_autoparallel.pipeline.dissemination import RING_UP_TO, begun, most_of_all
from lightning_autoparallel.pipeline.own_writes import differing_writes
from lightning_autoparallel.torch_compat.gloo import one_gloo_thread
from lightning_autoparallel.torch_compat.tree import tree_flatten, tree_unflatten

PATIENCE = timedelta(seconds=20)  # of a rank with an error, for others to come and hear of it
_LEAST = -(2**62)  # less than any number that is compared, or its negative


@dataclass(frozen=True, kw_only=True)
class StepIdentity:
    """What a rank is about to run; all ranks must be about to run the same."""

    name: str
    batch: str
    shapes: Mapping[str, tuple[int, ...]]  # of the batch's tensors, by path
    values: Mapping[str, str]  # digests of replicated leaves, by path
    variant: int
    module_state: str
    fed: str = ""  # what the captured step takes from outside of its batch
    buffers: Mapping[str, str] = field(default_factory=dict)  # digests of those that changed between steps, by name
    written: str = ""  # what the ranks' own Python has written into parameters since the last step


@dataclass(frozen=True)
class Carried:
    """What ranks compare besides in a step's message.

    They are ``told`` every rank's ``value`` where texts differ, their own where all messages are equal.
    """

    text: str
    value: Any
    told: Callable[[list[Any]], None]


def _nothing() -> None:
    pass


class ControlGroup:
    """All ranks on a gloo group apart from the mesh's: nothing the step launches is counted or delayed by it.

    ``shards`` says of each rank which batch shard it has a part of, where several ranks have parts of one.
    """

    ring_up_to = RING_UP_TO

    def __init__(self, timeout: timedelta, shards: Sequence[int] = ()) -> None:
        self.shards = tuple(shards)
        self.join: Callable[[], None] = _nothing  # runs what other ranks run ahead of an answer
        self._begun: Callable[[], bool] | None = None
        self.carried: Carried | None = None  # for the next step's message
        self.has_trained = False  # a training step was compared since ranks met before a batch
        # A fake world has one process, which agrees with itself.
        self._alone = dist.get_world_size() == 1 or dist.get_backend() == "fake"
        with one_gloo_thread():
            self._group = None if self._alone else dist.new_group(backend="gloo", timeout=timeout)

    @property
    def group(self) -> Any:
        """For who talks on the thread that trains; None where there is nobody else."""
        return self._group

    @property
    def alone(self) -> bool:
        """Whether there is no other rank to differ from."""
        return self._alone

    def agrees(self, text: str) -> bool:
        """Whether every rank gave the same text, of which 16 bytes are sent."""
        agreed = self._compare(text, None)
        assert agreed is not None, "without a timeout of its own it ends with that of the group, which raises"
        return agreed

    def meet(self, text: str, waits: str, line: str = "") -> bool:
        """As ``agrees``, where some ranks may never come: after 20 s a rank warns that it ``waits``.

        Who has come elsewhere is told of it, and of the ``line``.
        """
        if self._compare(text, None, lambda: warnings.warn(waits, stacklevel=2)):
            return True
        self.gather(f"{line} {text}" if line else text)  # for the others to read
        return False

    def meet_soon(self, text: str) -> bool | None:
        """As ``agrees``, where some ranks may never come: None if they have not within 20 s."""
        return self._compare(text, PATIENCE)

    def agrees_in_shards(self, text: str, shared: str) -> bool | None:
        """Whether ranks of each batch shard gave the same ``shared``; None if not all ranks gave the same text."""
        if self._alone:
            return True
        bounds = self._most(self._numbers(text, shared))
        assert bounds is not None, "without a timeout of its own it ends with that of the group, which raises"
        agreed, *in_shards = self._joined(bounds)
        return all(in_shards) if agreed else None

    def begin(self, text: str) -> Callable[[], bool]:
        """As ``agrees``, of a step that this rank runs before it knows: what it returns waits for the answer.

        Nothing else may be asked before. Ranks that differ and do not run it themselves ``join``: they run the forward
        that all have agreed on last, so that nobody waits in a collective of it.
        """
        if self._alone:
            return lambda: True
        assert self._group is not None
        answer = begun(self._numbers(text, ahead=True), self._group, self.ring_up_to)

        def wait() -> bool:
            self._begun = None
            return _alike(answer())[0]

        self._begun = wait
        return wait

    def _compare(self, text: str, timeout: timedelta | None, late: Callable[[], None] | None = None) -> bool | None:
        """Whether every rank gave the same text; None if some took longer than ``timeout``."""
        if self._alone:
            return True
        bounds = self._most(self._numbers(text), timeout, late)
        return None if bounds is None else self._joined(bounds)[0]

    def _joined(self, bounds: Tensor) -> list[bool]:
        """What is alike on all ranks; where they differ, those that run ahead have been joined."""
        alike = _alike(bounds)
        if not alike[0] and bool(bounds[-1, 0]):
            self.join()
        return alike

    def _numbers(self, text: str, shared: str = "", ahead: bool = False) -> Tensor:
        """What is compared, as a number and its negative, below that of each batch shard, and last who runs ahead.

        There are as many where nothing of shards is asked, so that ranks in different places find out.
        """
        numbers = torch.full((2 + len(set(self.shards)), 2), _LEAST)
        numbers[0], numbers[-1] = _number(text), int(ahead)
        if self.shards:
            numbers[1 + self.shards[dist.get_rank()]] = _number(shared)
        return numbers

    def _most(
        self, mine: Tensor, timeout: timedelta | None = None, late: Callable[[], None] | None = None
    ) -> Tensor | None:
        assert self._group is not None
        if self._begun is not None and not self._begun():
            raise OtherRankError("ranks differ in a step that this one has left by a signal, before it knew")
        return most_of_all(mine, self._group, timeout, None if late is None else (PATIENCE, late), self.ring_up_to)

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, by rank."""
        if self._alone:
            return [value]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def told_by_first(self, value: Any) -> Any:
        """What rank 0 has; of the others nothing is sent, and theirs is not looked at."""
        if self._alone:
            return value
        told = [value if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(told, src=0, group=self._group)
        return told[0]

    def told_by_first_of_shard(self, value: Any) -> Any:
        """What the first rank of this rank's batch shard has, where all its ranks ask; others hear nothing of it."""
        rank = dist.get_rank()
        first, *others = [other for other, shard in enumerate(self.shards) if shard == self.shards[rank]]
        told = [value]
        if rank != first:
            dist.recv_object_list(told, src=first, group=self._group)
        else:
            for other in others:
                dist.send_object_list(told, dst=other, group=self._group)
        return told[0]

    def same_batch(self, batch: Any) -> Any:
        """The batch of rank 0, for a batch that all ranks should hold alike; on this rank's devices."""
        leaves, spec = tree_flatten(batch)
        spelled = [digest(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
        if self.agrees(repr(spelled)):
            return batch
        on_host = [leaf.cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        first = self.told_by_first(on_host)
        devices = [leaf.device if isinstance(leaf, Tensor) else None for leaf in leaves]
        moved = [leaf if device is None else leaf.to(device) for leaf, device in zip(first, devices, strict=True)]
        return tree_unflatten(moved, spec)

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """For each of as many flags on every rank whether some rank has set it."""
        if self._alone or not flags:
            return list(flags)
        found = self._most(torch.tensor(flags, dtype=torch.uint8))
        assert found is not None, "without a timeout of its own it ends with that of the group, which raises"
        return [bool(flag) for flag in found.tolist()]

    def raise_together(self, error: Exception | None, at: str = "") -> None:
        """Raise on all ranks if any has an error: its own, or the first other rank's.

        An error that is not ours and that only some ranks have becomes one of ours, so that no rank goes on alone.
        ``at`` says how far this rank has come, where ranks may have come to different places; its own error is then
        raised as it is.

        Raises:
            AutoParallelError: some rank has an error, or (OtherRankError) has come to another place.
        """
        # Others may be in a collective of the step, which this rank will not join: they end when it does.
        agreed = self._compare(at if error is None else "error", PATIENCE if at and error is not None else None)
        if agreed and error is None:
            return
        if agreed is None and error is not None:
            raise error
        places = self.gather(at if error is None else Stopped(_message(error), _kind(error)))
        if error is None:
            other = other_place(places)
            raise other if at else _first_error(places)
        alone = not all(isinstance(place, Stopped) for place in places)
        if alone and not at and not isinstance(error, AutoParallelError):
            raise CaptureError(f"this rank alone stopped: {_message(error)}") from error
        raise error


@dataclass(frozen=True)
class Stopped:
    """What a rank that has an error says in place of what it is about to do."""

    message: str
    kind: type[AutoParallelError] = CaptureError


def _first_error(places: list[Any]) -> AutoParallelError:
    """The first error of another rank, of the kind that it has: all ranks make the same of it."""
    rank, stopped = next((rank, place) for rank, place in enumerate(places) if isinstance(place, Stopped))
    return stopped.kind(f"rank {rank} stopped: {stopped.message}")


def _kind(error: Exception) -> type[AutoParallelError]:
    return type(error) if isinstance(error, AutoParallelError) else CaptureError


def other_place(places: list[Any]) -> OtherRankError:
    """The error of a rank that finds others in another place than its own: one has stopped, or runs other code."""
    for rank, place in enumerate(places):
        if isinstance(place, Stopped):
            return OtherRankError(f"rank {rank} stopped: {place.message}")
    shown = ", ".join(f"rank {rank} at {getattr(place, 'name', place)!r}" for rank, place in enumerate(places))
    error = OtherRankError(
        f"ranks have come to different places of a step: {shown}; every rank must call the same modules and "
        "collectives in the same order, take as many batches (of validations, too), skip the same of them, and end its "
        "training alike"
    )
    error.places = tuple(places)
    return error


def _same_place(everyone: list[Any]) -> list[StepIdentity]:
    """What all ranks are about to run.

    Raises:
        OtherRankError: one of them is about to do something else.
    """
    if not all(isinstance(place, StepIdentity) for place in everyone):
        raise other_place(everyone)
    return everyone


def differences_of_step(everyone: list[StepIdentity]) -> list[str]:
    """What ranks have written different values into, where what they are about to run differs in nothing else.

    Raises:
        RanksDifferError: they hold batches of different shapes, or different values of a replicated leaf.
        ConfigError: they froze different parameters.
        CaptureError: they took different branches.
    """
    first = everyone[0]
    if all(replace(theirs, written=first.written) == first for theirs in everyone):
        return differing_writes([theirs.written for theirs in everyone]) or []
    for rank, theirs in enumerate(everyone):
        if (theirs.name, theirs.batch) != (first.name, first.batch):
            raise RanksDifferError(
                f"ranks hold different batches: rank 0 has {first.name} on {first.batch}, rank {rank} has "
                f"{theirs.name} on {theirs.batch}; {_remedy(first.shapes, theirs.shapes)}"
            )
    for rank, theirs in enumerate(everyone):
        for path in [path for path, value in first.values.items() if theirs.values.get(path) != value]:
            raise RanksDifferError(
                f"batch leaf '{path}' has other values on rank {rank} than on rank 0, but its dim 0 is not the batch, "
                f"so it is replicated; give all ranks the same values, or set batch_dims={{'{path}': 0}}"
            )
    _check_same_state(everyone)
    for rank, theirs in enumerate(everyone):
        if theirs.variant == first.variant and theirs.fed != first.fed:
            raise CaptureError(
                f"what the step reads beside its batch (attributes, numbers) is {theirs.fed} on rank {rank} and "
                f"{first.fed} on rank 0, and all ranks compute one step together: have them agree"
            )
        names = {**first.buffers, **theirs.buffers}
        for name in [name for name in names if theirs.buffers.get(name) != first.buffers.get(name)]:
            raise CaptureError(
                f"buffer {name}, which the step reads, was changed between steps and has other values on rank {rank} "
                "than on rank 0, and all ranks compute one step together: change it by what ranks have in common "
                "(self.all_gather)"
            )
    raise CaptureError("ranks took different branches of the step")


def check_same_call(control: ControlGroup, mine: StepIdentity) -> None:
    """Compare the module call that ranks are about to make, before any of them starts a collective.

    Raises:
        RanksDifferError: the same call, on arguments of different shapes or values.
        OtherRankError: ranks call different modules, or one of them has stopped.
        ConfigError: they call one module in different states.
        CaptureError: they took different branches in the module, or draw other random numbers in it.
    """
    if control.agrees(repr(mine)):
        return
    everyone = _same_place(control.gather(mine))
    first = everyone[0]
    if any(theirs.name != first.name for theirs in everyone):
        raise other_place(everyone)
    for rank, theirs in enumerate(everyone):
        if (theirs.batch, theirs.values) != (first.batch, first.values):
            raise RanksDifferError(
                f"ranks call {first.name} with different arguments: rank 0 with {first.batch}, rank {rank} with "
                f"{theirs.batch}"
            )
    _check_same_state(everyone)
    for rank, theirs in enumerate(everyone):
        if theirs.variant == first.variant and theirs.fed != first.fed:
            raise CaptureError(
                f"{first.name} draws the random numbers of an earlier call again on one of the ranks 0 and {rank}, and "
                "new ones on the other, and ranks compute parts of one call: restore or seed torch's generator on all "
                "of them alike"
            )
    raise CaptureError(f"ranks took different branches in {first.name}")


def _check_same_state(everyone: list[StepIdentity]) -> None:
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        if theirs.module_state != first.module_state:
            raise ConfigError(
                f"{first.name}: rank {rank} froze other parameters than rank 0, or has modules in another mode "
                "(train, eval, autocast, no_grad): they must decide alike"
            )


def _remedy(mine: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]]) -> str:
    """What makes two ranks' batches alike: rows where dim 0 differs, padding where another dim does."""
    if mine.keys() != theirs.keys() or any(len(mine[path]) != len(theirs[path]) for path in mine):
        return "give every rank the same kind of batch"
    pairs = ((path, dim, size, theirs[path][dim]) for path, shape in mine.items() for dim, size in enumerate(shape))
    differing = [item for item in pairs if item[2] != item[3]]
    if not differing:  # but in dtypes
        return "give every rank the same kind of batch"
    if any(dim == 0 for _, dim, _, _ in differing):
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
    apart = rows_apart(control.gather((shard, digests)))
    if apart is not None:
        raise other_rows(apart)


def other_rows(apart: str) -> ConfigError:
    """The error of loaders that were not made for the mesh."""
    return ConfigError(
        f"{apart}: only dp_* axes divide the batch; let the Trainer make the sampler, or give "
        "yours **strategy.distributed_sampler_kwargs and the same seed on every rank"
    )


def rows_apart(everyone: Sequence[tuple[int, Mapping[str, str]]]) -> str | None:
    """Which ranks of one batch shard hold different rows, of each rank's shard and digests by path."""
    first_of: dict[int, tuple[int, Mapping[str, str]]] = {}
    for rank, (shard, theirs) in enumerate(everyone):
        first, expected = first_of.setdefault(shard, (rank, theirs))
        for path in [path for path, value in expected.items() if theirs.get(path) != value]:
            return (
                f"ranks {first} and {rank} share batch shard {shard} but hold different rows in batch leaf "
                f"'{path or 'batch'}'"
            )
    return None


def _alike(bounds: Tensor) -> list[bool]:
    """Of the text, and of what each batch shard shares, whether all ranks gave the same."""
    return (bounds[:-1, 0] == -bounds[:-1, 1]).tolist()  # type: ignore[no-any-return]


def _number(text: str) -> Tensor:
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    return torch.tensor([number, -number])


def first_difference(everyone: Sequence[Mapping[str, str]]) -> str | None:
    """What rank 0 has under a name and another rank has not, in words; None where all have the same under each."""
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name in (*first, *theirs):
            own, other = first.get(name, "not there"), theirs.get(name, "not there")
            if own != other:
                return f"{name} is {own} on rank 0 and {other} on rank {rank}"
    return None


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, AutoParallelError) else f"{type(error).__name__}: {error}"
