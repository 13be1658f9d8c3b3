"""How tensors go into the graphs of a step and come out: what is the same at each of its runs, found out once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_autoparallel.contracts import GraphInput, PartitionedGraph
from lightning_autoparallel.torch_compat.dtensors import laid_out_as, part_of
from lightning_autoparallel.torch_compat.tracing import active_fake_mode


class Layout(Protocol):
    """How a parameter lies on this rank; graphs work on shards padded to the same size everywhere."""

    @property
    def pads(self) -> bool:
        """Whether this rank's shard is smaller than what graphs take."""

    @property
    def unpads(self) -> bool:
        """Whether its part of the gradient is smaller than what they give."""

    def padded(self, local: Tensor) -> Tensor: ...
    def unpadded(self, local: Tensor) -> Tensor: ...
    def distribute(self, local: Tensor) -> DTensor: ...


Layouts = Sequence[Layout | None]  # one for each input, None for what is no sharded parameter
_SMALL = 65536  # elements of a buffer


@dataclass(frozen=True, kw_only=True)
class SavedInput:
    """An input that the backward reads, by its place among those that are given."""

    place: int
    is_buffer: bool
    is_written: bool  # by the forward

    def kept(self, tensor: Tensor, is_part: bool) -> Tensor:
        """What the backward reads of it: of a buffer that the step changes, its value before.

        Where the graph is a part of a step, other parts may change it, as batch norm does in its other mode.
        """
        changes = self.is_written or (
            is_part and self.is_buffer and tensor.is_floating_point() and tensor.numel() <= _SMALL
        )
        return tensor.clone() if changes else tensor


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """Where a step's graphs take their tensors from, and what becomes of what they return.

    Inputs are those that a step is given: all but its constants and tangents. ``results`` is how many outputs come
    before the gradients and the saved values. ``differentiable`` has the places of the outputs that have a tangent, in
    the order of the tangents, and ``tangents`` what the backward takes them as. ``gradients`` pairs the places of
    inputs with those of their gradients among the ``produced`` tensors that the backward returns.
    """

    layouts: Layouts
    inputs: tuple[GraphInput, ...]
    results: int
    saved: tuple[SavedInput, ...]
    differentiable: tuple[int, ...]
    tangents: tuple[Tensor, ...]
    produced: int
    gradients: tuple[tuple[int, int], ...]
    pads: tuple[int, ...]

    @classmethod
    def of(cls, partitioned: PartitionedGraph, layouts: Layouts) -> Wiring:
        """That of a step whose inputs lie as ``layouts`` say."""
        inputs, outputs = partitioned.sharded.inputs, partitioned.sharded.outputs
        given = [(position, item) for position, item in enumerate(inputs) if item.kind != "tangent"]
        places = {position: place for place, (position, _) in enumerate(given)}
        written = {item.name for item in outputs if item.kind == "buffer"}
        saved = [(places[position], inputs[position]) for position in partitioned.saved_inputs]
        names = [(item.kind, item.name) for item in outputs]
        tangents = [item.name for item in inputs if item.kind == "tangent"]
        produced = [(item.of, item.name) for item in outputs if item.kind == "gradient"]
        by_name = {name: place for place, name in enumerate(produced)}
        own = tuple(item for _, item in given[: len(layouts)])
        wanted = [(i, by_name.get((item.kind, item.name))) for i, item in enumerate(own)]
        return cls(
            layouts=layouts,
            inputs=own,
            results=len(outputs) - len(produced),
            saved=tuple(
                SavedInput(
                    place=place,
                    is_buffer=item.kind == "buffer",
                    is_written=item.kind == "buffer" and item.name in written,
                )
                for place, item in saved
            ),
            differentiable=tuple(names.index(("output", name)) for name in tangents),
            tangents=_last_placeholders(partitioned, len(tangents)),
            produced=len(produced),
            gradients=tuple((i, place) for i, place in wanted if place is not None),
            pads=tuple(i for i, layout in enumerate(layouts) if layout is not None and layout.pads),
        )

    def parts(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What this rank holds of each input, as graphs take it."""
        assert len(inputs) == len(self.layouts)
        is_traced = active_fake_mode() is not None  # who partitions anew tells what is given from what is saved
        parts = [own_part(tensor).detach() if is_traced else own_part(tensor) for tensor in inputs]
        for i in self.pads:
            layout = self.layouts[i]
            assert layout is not None
            parts[i] = layout.padded(parts[i])
        return parts

    def by_input(self, parameters: Sequence[DTensor | None], produced: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the inputs, None where there is none; those of parameters as they lie in ``parameters``."""
        assert len(parameters) == len(self.layouts) and len(produced) == self.produced
        found: list[Tensor | None] = [None] * len(self.layouts)
        for i, place in self.gradients:
            layout, gradient = self.layouts[i], produced[place]
            if layout is None:
                found[i] = gradient
                continue
            local = layout.unpadded(gradient) if layout.unpads else gradient
            found[i] = layout.distribute(laid_out_as(parameters[i], local))
        return found


def _last_placeholders(partitioned: PartitionedGraph, count: int) -> tuple[Tensor, ...]:
    """Without values, what the backward takes behind all else."""
    if partitioned.backward is None or not count:
        return ()
    nodes = list(partitioned.backward.graph.find_nodes(op="placeholder"))
    return tuple(node.meta["val"] for node in nodes[-count:])


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, which no graph of gradients leads to."""
    part = part_of(tensor) if isinstance(tensor, DTensor) else tensor
    return part.detach() if part.requires_grad else part


def detached_where_given(results: list[Tensor], given: set[int]) -> list[Tensor]:
    """``results``, of which those that are ``given`` tensors themselves, by their ids, are others of the same memory.

    What autograd or a user does to a result is not done to a parameter's shard.
    """
    return [result.detach() if id(result) in given else result for result in results]


def distinct(results: list[Tensor]) -> list[Tensor]:
    """The results as different tensors: a loss that is logged too is one value, but has a gradient once."""
    if len(set(map(id, results))) == len(results):
        return results
    seen: set[int] = set()
    different = []
    for result in results:
        different.append(result.clone() if id(result) in seen else result)
        seen.add(id(result))
    return different
