"""What a captured step's Python writes, and how each real step writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from lightning_autoparallel.capture.leaf_stand_ins import Unread
from lightning_autoparallel.capture.places import MISSING, Place
from lightning_autoparallel.capture.plain import is_fixed, is_plain
from lightning_autoparallel.capture.reads import StateReads
from lightning_autoparallel.capture.stand_ins import DictStandIn, ListStandIn
from lightning_autoparallel.capture.watch import Watched, evaluated
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.torch_compat.tracing import is_real
from lightning_autoparallel.torch_compat.tree import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class _Slot:
    """Stands for the n-th tensor that the graph gives for writes."""

    index: int


@dataclass(frozen=True)
class _At:
    """Stands for what is found at a place when the step starts."""

    place: Place


@dataclass(frozen=True, kw_only=True)
class _Write:
    how: Literal["set", "append"]
    place: Place
    leaves: tuple[Any, ...]
    spec: Any
    line: str


@dataclass
class StateWrites:
    """The writes of one run: ``collect`` while they are in place, ``replay`` at each real step."""

    reads: StateReads
    local: bool = False  # of a module call: what follows it may differentiate what it keeps
    tensors: list[Tensor] = field(default_factory=list)
    _writes: list[_Write] = field(default_factory=list)
    _leaves: tuple[int, ...] = ()

    @property
    def has_any(self) -> bool:
        """Whether the run has written anything."""
        return bool(self._writes or self._leaves)

    def collect(self, leaves: Mapping[int, Tensor]) -> None:
        """Note what the run has written; ``leaves`` are the tensors of the batch that it changed, by position.

        Raises:
            CaptureError: it wrote what cannot be made again at each step.
        """
        behind = self.reads.changed_behind()
        if behind is not None:
            raise CaptureError(
                f"a function in C changes {behind}, which nothing tells of: it would happen at capture only"
            )
        self.tensors, self._writes = [leaf.detach() for leaf in leaves.values()], []
        self._leaves = tuple(leaves)
        for written in list(self.reads.written.values()):
            if written.is_cache:
                continue
            value = written.value if written.is_undone else written.place.read()
            if not _is_state_of_module(written.place, written.line) and not (
                value is MISSING and written.before is MISSING
            ):
                self._add("set", written.place, value, written.line)
        for container, line in list(self.reads.changed.values()):
            if isinstance(container, ListStandIn):
                self._list(container, line)
            else:
                for key, value in container.written.items():
                    self._add("set", container.place_of(key), value, line)

    def _list(self, container: ListStandIn, line: str) -> None:
        assert container.place is not None
        if container.rewritten:
            place = Place("items", container.place, None, container.place.text)
            self._add("set", place, list.copy(container), line)
            return
        for value in container.appended:
            self._add("append", container.place, value, line)

    def _add(self, how: Any, place: Place, value: Any, line: str) -> None:
        leaves, spec = tree_flatten(_unwrapped(value))
        kept = tuple(self._keep(leaf, place, line) for leaf in leaves)
        self._writes.append(_Write(how=how, place=place, leaves=kept, spec=spec, line=line))

    def _keep(self, leaf: Any, place: Place, line: str) -> Any:
        if isinstance(leaf, Tensor) and not is_real(leaf) and type(leaf) is not nn.Parameter:
            if self.local and leaf.requires_grad:
                raise CaptureError(
                    f"{line} keeps a tensor that carries a gradient in {place.text}, which only the module's own code "
                    "can: what follows its call may differentiate it"
                )
            self.tensors.append(leaf.detach())
            return _Slot(len(self.tensors) - 1)
        if type(leaf) in (Watched, Unread) or is_plain(leaf) or is_fixed(leaf) or leaf is MISSING:
            return leaf
        if type(leaf) in (ListStandIn, DictStandIn) and leaf.place is not None:
            return _At(leaf.place)
        if isinstance(leaf, Tensor) and self.reads.tensors.get(id(leaf), (None, None))[1] is not None:
            return _At(self.reads.tensors[id(leaf)][1])  # type: ignore[arg-type]
        if self.reads.is_reached(leaf) and not isinstance(leaf, Tensor):
            return leaf
        raise CaptureError(
            f"{line} keeps a {type(leaf).__name__} in {place.text}: a captured step can keep tensors, numbers, strings "
            "and containers of them"
        )

    def kept(self, counters: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
        """Of each tensor that the run wrote, and each number that it added up: line, place, and what it wrote."""
        counted = self.reads.written_numbers()
        for write in self._writes:
            adds = write.how == "append" or write.place.identity in counted
            for leaf in write.leaves:
                if type(leaf) is _Slot:
                    yield write.line, write.place.text, self.tensors[leaf.index]
                elif adds and type(leaf) in (int, float, Watched):
                    yield write.line, write.place.text, evaluated(leaf, counters)

    def prepare(self) -> dict[int, Any]:
        """What real steps need to read before they write."""
        places = [leaf.place for write in self._writes for leaf in write.leaves if type(leaf) is _At]
        return {id(place): place.read() for place in places}

    def replay(
        self,
        values: Sequence[Tensor],
        counters: Mapping[str, Any],
        found: Mapping[int, Any],
        batch: Sequence[Tensor] = (),
    ) -> None:
        """Write with the ``values`` of a real step; ``found`` is what ``prepare`` gave before it."""
        for position, value in zip(self._leaves, values, strict=False):
            batch[position].copy_(value)
        for write in self._writes:
            leaves = [_made(leaf, values, counters, found) for leaf in write.leaves]
            value = tree_unflatten(leaves, write.spec)
            if write.how == "append":
                write.place.read().append(value)
            else:
                write.place.write(value)


def made_again(leaf: Any, counters: Mapping[str, Any]) -> Any:
    """A result of the step that is no tensor, as a real step gives it."""
    return counters[leaf.name] if type(leaf) is Unread else evaluated(leaf, counters)


def _made(leaf: Any, values: Sequence[Tensor], counters: Mapping[str, Any], found: Mapping[int, Any]) -> Any:
    if type(leaf) is _Slot:
        return values[leaf.index]
    return found[id(leaf.place)] if type(leaf) is _At else made_again(leaf, counters)


def _unwrapped(value: Any) -> Any:
    """A container that the step made out of a stand-in is a plain one."""
    if type(value) is ListStandIn and value.place is None:
        return list(value)
    return dict(value) if type(value) is DictStandIn and value.place is None else value


def _is_state_of_module(place: Place, line: str) -> bool:
    """Whether a module keeps what was assigned as a buffer, which the graph gives."""
    owner = place.owner
    if not isinstance(owner, nn.Module):
        return False
    if place.key in owner._parameters or place.key in owner._modules:
        raise CaptureError(
            f"{line} assigns a parameter or a module to {place.text}: a step's graph has those it began with"
        )
    return place.key in owner._buffers
