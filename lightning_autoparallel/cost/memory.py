"""``predict_step_memory``: the live bytes of a step's forward and backward, and of what goes from one to the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import fx

from lightning_autoparallel.contracts import MemoryShare, PartitionedGraph
from lightning_autoparallel.cost.liveness import MemoryTimeline, Surroundings, predict_memory
from lightning_autoparallel.cost.storage import Storage, resolve_storages, rounded
from lightning_autoparallel.fx import nodes as fxn

__all__ = ["MemoryTimeline", "StepMemory", "predict_memory", "predict_step_memory", "surroundings_of"]

_OWNED_BY_CALLER = {"batch", "buffer", "constant"}
_KEPT_BY_CALLER = {"output", "log"}


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The memory of a step's forward, and of its backward where there is one."""

    forward: MemoryTimeline
    backward: MemoryTimeline | None = None

    @property
    def peak_bytes(self) -> int:
        """The larger of both peaks."""
        return self._fuller.peak_bytes

    @property
    def largest(self) -> tuple[MemoryShare, ...]:
        """The three largest storages that are alive there."""
        return tuple(sorted(self.contributors, key=lambda share: -share.size_bytes)[:3])

    @property
    def contributors(self) -> tuple[MemoryShare, ...]:
        """What is alive there."""
        return self._fuller.contributors

    @property
    def _fuller(self) -> MemoryTimeline:
        halves = [half for half in (self.forward, self.backward) if half is not None]
        return max(halves, key=lambda half: half.peak_bytes)


def predict_step_memory(partitioned: PartitionedGraph, *, allocation_bytes: int = 1) -> StepMemory:
    """The memory of both halves of a step on one rank, parameter shards and optimizer state not counted.

    The batch, buffers and constants are alive throughout; what the step returned (loss, outputs, logged values) is
    alive through the backward, whose caller holds it. Saved values are freed after their last use, gradients are alive
    from their creation to the end, and through the next step's forward unless they are freed before it. Where those of
    micro-batches add up, earlier ones are alive through the backward too. Every storage is rounded up to a multiple of
    ``allocation_bytes``.

    Raises:
        UnsupportedOpError: a node has no recorded value.
    """
    handover = _Handover(partitioned)
    forward = predict_memory(
        partitioned.forward.graph, surroundings=handover.forward(allocation_bytes), allocation_bytes=allocation_bytes
    )
    if partitioned.backward is None:
        return StepMemory(forward=forward)
    around = handover.backward(partitioned.backward.graph, allocation_bytes)
    backward = predict_memory(partitioned.backward.graph, surroundings=around, allocation_bytes=allocation_bytes)
    return StepMemory(forward=forward, backward=backward)


def surroundings_of(partitioned: PartitionedGraph, graph: fx.Graph, *, room_bytes: int = 0) -> Surroundings:
    """What the caller decides of the memory of the forward or the backward graph, as ``predict_step_memory`` has it.

    The forward is told how much the backward takes in its present order, both what ``room_bytes`` there is.

    Raises:
        UnsupportedOpError: a node of the backward has no recorded value.
    """
    handover = _Handover(partitioned)
    if graph is partitioned.forward.graph:
        around = replace(handover.forward(1), room_bytes=room_bytes)
        if partitioned.backward is None:
            return around
        later = handover.backward(partitioned.backward.graph, 1)
        peak = predict_memory(partitioned.backward.graph, surroundings=later).peak_bytes
        return replace(around, elsewhere_bytes=peak)
    assert partitioned.backward is not None and graph is partitioned.backward.graph
    return replace(handover.backward(graph, 1), room_bytes=room_bytes)


class _Handover:
    """Follows storages from the forward, through autograd and the caller, into the backward."""

    def __init__(self, partitioned: PartitionedGraph) -> None:
        self._partitioned = partitioned
        sharded = partitioned.sharded
        training = partitioned.backward is not None
        self._inputs = [item for item in sharded.inputs if not (training and item.kind == "tangent")]
        self._given = partitioned.forward.graph.find_nodes(op="placeholder")
        (output,) = partitioned.forward.graph.find_nodes(op="output")
        self._returned = list(output.args[0])
        results = [item.kind for item in sharded.outputs if not (training and item.kind == "gradient")]
        self._result_kinds = [*results, *["saved"] * partitioned.saved_values]
        self._storages = resolve_storages(partitioned.forward.graph)

    def forward(self, allocation_bytes: int) -> Surroundings:
        kinds = {node.name: item.kind for node, item in zip(self._given, self._inputs, strict=True)}
        return Surroundings(
            excluded={name for name, kind in kinds.items() if kind == "parameter"},
            held={name for name, kind in kinds.items() if kind in _OWNED_BY_CALLER},
            kinds=kinds,
            results=self._result_kinds,
            outside=self._earlier_gradients(allocation_bytes) if self._partitioned.earlier_gradients != "freed" else [],
        )

    def _earlier_gradients(self, allocation_bytes: int) -> list[MemoryShare]:
        """What the caller holds of the step before, as large as what the backward returns."""
        if self._partitioned.backward is None:
            return []
        items = [item for item in self._partitioned.sharded.outputs if item.kind == "gradient"]
        results = self._partitioned.backward.graph.output_node().args[0]
        pairs = zip(results, items, strict=True)  # type: ignore[arg-type]
        gradients = [node for node, item in pairs if item.is_parameter_gradient and isinstance(node, fx.Node)]
        found = resolve_storages(self._partitioned.backward.graph)
        held = {index for node in gradients for index in found.of(node)}
        size = sum(rounded(found.storages[index].size_bytes, allocation_bytes) for index in held)
        adds_up = self._partitioned.earlier_gradients == "kept"
        name = "earlier micro-batches' gradients" if adds_up else "the last step's gradients"
        return [MemoryShare(name=name, size_bytes=size, kind="gradient", module="")]

    def backward(self, graph: fx.Graph, allocation_bytes: int) -> Surroundings:
        placeholders = graph.find_nodes(op="placeholder")
        sources = self._handed_over()
        same = {p.name: self._storage(source) for p, (source, _) in zip(placeholders, sources, strict=False)}
        kinds = {p.name: kind for p, (_, kind) in zip(placeholders, sources, strict=False)}
        tangents = [p.name for p in placeholders[len(sources) :]]
        parameters, held = self._parameters(), self._held()
        added_to = self._earlier_gradients(allocation_bytes) if self._partitioned.earlier_gradients == "kept" else []
        return Surroundings(
            excluded={name for name, storage in same.items() if storage in parameters},
            held={*tangents, *(name for name, storage in same.items() if storage in held)},
            same=same,
            kinds={**kinds, **dict.fromkeys(tangents, "tangent")},
            results=[item.kind for item in self._partitioned.sharded.outputs if item.kind == "gradient"],
            outside=[
                *added_to,
                *(
                    _contributor(storage, kind, allocation_bytes)
                    for storage, kind in held.items()
                    if storage not in parameters and storage not in same.values()
                ),
            ],
        )

    def _handed_over(self) -> list[tuple[fx.Node, str]]:
        """What the backward's placeholders, tangents apart, were in the forward, and their kinds."""
        by_position = self._forward_position()
        inputs = [by_position[position] for position in self._partitioned.saved_inputs]
        count = self._partitioned.saved_values
        values = self._returned[len(self._returned) - count :] if count else []
        return [
            *((self._given[i], self._inputs[i].kind) for i in inputs),
            *((value, "saved") for value in values),
        ]

    def _forward_position(self) -> dict[int, int]:
        """Positions among all inputs to those among the forward's, which has no tangents."""
        given = (i for i, item in enumerate(self._partitioned.sharded.inputs) if item.kind != "tangent")
        return {position: index for index, position in enumerate(given)}

    def _parameters(self) -> set[Storage]:
        pairs = zip(self._given, self._inputs, strict=True)
        return {storage for node, item in pairs if item.kind == "parameter" for storage in self._of(node)}

    def _held(self) -> dict[Storage, str]:
        """What the caller holds through the backward."""
        given = ((node, item.kind) for node, item in zip(self._given, self._inputs, strict=True))
        returned = zip(self._returned, self._result_kinds, strict=True)
        owned = {s: kind for node, kind in given if kind in _OWNED_BY_CALLER for s in self._of(node)}
        kept = {s: kind for node, kind in returned if kind in _KEPT_BY_CALLER for s in self._of(node)}
        return {**kept, **owned}

    def _storage(self, node: fx.Node) -> Storage:
        (storage,) = self._of(node)
        return storage

    def _of(self, node: object) -> Iterable[Storage]:
        indices = self._storages.of(node) if isinstance(node, fx.Node) else ()
        return [self._storages.storages[index] for index in indices]


def _contributor(storage: Storage, kind: str, allocation_bytes: int) -> MemoryShare:
    module = fxn.module_path(storage.node) or ""
    size = rounded(storage.size_bytes, allocation_bytes)
    return MemoryShare(name=storage.name, size_bytes=size, kind=kind, module=module)
