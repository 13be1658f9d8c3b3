"""What the graph of a step returns, taken apart: buffers' new values, the result, what its effects replay with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_autoparallel.contracts import CapturedGraph


class Results(NamedTuple):
    """The tensors of the step's result, in its order, and those that its recorded effects replay with."""

    outputs: list[Tensor]
    effects: list[Tensor]


def take_apart(captured: CapturedGraph, results: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> Results:
    """Copy new values of buffers into ``buffers`` and sort the rest; ``results`` are all but gradients, in order."""
    items = [item for item in captured.outputs if item.kind != "gradient"]
    outputs: dict[int, Tensor] = {}
    effects: list[Tensor] = []
    for item, result in zip(items, results, strict=True):
        if item.kind == "buffer":
            buffers[item.name].copy_(result)
        elif item.kind == "log":
            effects.append(result)
        else:
            outputs[int(item.name)] = result
    return Results([outputs[position] for position in sorted(outputs)], effects)


def with_statics(outputs: Sequence[Any], statics: Mapping[int, Any]) -> list[Any]:
    """The leaves of the step's result: ``statics`` at their positions, ``outputs`` at the others."""
    remaining = list(outputs)
    return [statics[i] if i in statics else remaining.pop(0) for i in range(len(outputs) + len(statics))]
