"""What the engine is asked to run, what it has captured of that, and what a run gives."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_autoparallel.apply import ParameterLayout, UnreducedLayout
from lightning_autoparallel.capture import (
    BatchLayout,
    Guard,
    StepEffects,
    StepState,
    Watcher,
    check_edges,
    leaf_counters,
)
from lightning_autoparallel.compile import Wiring
from lightning_autoparallel.config import PlanSpec
from lightning_autoparallel.contracts import CompiledStep
from lightning_autoparallel.errors import AutoParallelError, CaptureError, StepFailedError
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.torch_compat.default_world import is_lost_connection

Around = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """A kind of step: ``run(batch, watcher)`` is the user's code, ``effects()`` a fresh recorder for one capture.

    A ``local`` one is a call of the submodule at ``path``, on ``(args, kwargs)`` of this rank's rows: the program is
    this rank's alone but for parameters, whose gradients are averaged over the batch shards. It has a backward where
    ``training`` says so and autograd records, which an ``evaluating`` step may ask for, too. ``rows`` are those of the
    batches that its loader gives, None if unknown. The batch of a ``common`` one is the same on all ranks. What it
    keeps and returns may be ``seen_by_hooks``. ``code`` is what ``run`` calls.
    """

    name: str
    run: Callable[[Any, Watcher], Any]
    effects: Callable[[Watcher], StepEffects]
    training: bool
    loss_leaf: Callable[[Any], Tensor] | None = None
    local: bool = False
    path: str = ""
    rows: int | None = None
    common: bool = False
    seen_by_hooks: bool = False
    code: tuple[Any, ...] = ()
    evaluating: bool = False

    @property
    def trains(self) -> bool:
        """Whether its gradients are for the optimizer."""
        return self.training and not self.evaluating


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one real step gave: its result, and the tensors that its recorded effects replay with.

    ``effect_whole`` says which of them are equal on all ranks; the others are this rank's rows. ``numbers`` are the
    counters and other numbers that the step found. ``row_dims`` has, by the ids of tensors in the output, the dims in
    which these are the batch.
    """

    output: Any
    effects: StepEffects
    effect_tensors: tuple[Tensor, ...]
    effect_whole: tuple[bool, ...]
    step: CompiledStep
    numbers: Mapping[str, Any]
    row_dims: Mapping[int, int]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One captured step: what its graph is, what must be as it was for it to hold, and what happens besides."""

    step: CompiledStep
    state: StepState
    effects: StepEffects
    layouts: tuple[ParameterLayout | UnreducedLayout | None, ...]

    @functools.cached_property
    def wiring(self) -> Wiring:
        """How tensors go into its graphs and come out."""
        return Wiring.of(self.step.partitioned, self.layouts)

    @functools.cached_property
    def effect_whole(self) -> tuple[bool, ...]:
        """Of every tensor that is logged or written, whether it is equal on all ranks."""
        sharded = self.step.partitioned.sharded
        pairs = zip(sharded.outputs, sharded.output_placements, strict=True)
        return tuple(
            all(p.is_replicate() for p in placements or ()) for item, placements in pairs if item.kind == "log"
        )

    @functools.cached_property
    def read_buffers(self) -> tuple[str, ...]:
        """Names of buffers that the step computes with."""
        placeholders = self.step.captured.graph_module.graph.find_nodes(op="placeholder")
        pairs = zip(placeholders, self.step.captured.inputs, strict=True)
        return tuple(item.name for node, item in pairs if item.kind == "buffer" and node.users)

    @functools.cached_property
    def written_buffers(self) -> tuple[str, ...]:
        """Names of buffers that the step gives new values."""
        return tuple(item.name for item in self.step.captured.outputs if item.kind == "buffer")

    def holds(self, counters: Mapping[str, Any]) -> bool:
        """Whether it is what the step would be now."""
        return self.state.holds(self.state.values(counters))

    def fed(self, counters: Mapping[str, Any]) -> str:
        """What it takes from outside of its batch now, as ranks can compare it."""
        return self.state.fed(self.state.values(counters))

    def at_this_step(self) -> CompiledStep:
        """The step with the constants that Python finds now."""
        if not self.state.feeds:
            return self.step
        return dataclasses.replace(self.step, constants=self.state.constants(self.step.constants))


@dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """A captured step that others than the engine run, and what ranks must agree on before they do."""

    call: StepCall
    layout: BatchLayout
    index: int
    module_state: Any
    step: CompiledStep
    layouts: tuple[ParameterLayout | UnreducedLayout | None, ...]


def pinned_edges(plan: PlanSpec, mesh: ParallelMesh, module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Where rules pin values at the edges of modules, on axes that the mesh has."""
    edges = tuple((rule.kind, rule.pattern) for rule in plan.rules if rule.is_edge)
    check_edges(module, edges)
    active = mesh.active(mesh.spec.names)
    return tuple(
        (rule.kind, rule.pattern)
        for rule in plan.rules
        if rule.is_edge and any(axis in active for axis, _ in rule.placements)
    )


def layout_of(module: nn.Module, layouts: Mapping[str, ParameterLayout], name: str) -> ParameterLayout | None:
    """How the parameter of that name lies, None for one that is in no shards.

    Raises:
        CaptureError: it is no parameter, or was made after the ``layouts``.
    """
    path, _, own = name.rpartition(".")
    parameter = module.get_submodule(path)._parameters[own]
    if parameter is not None and not isinstance(parameter, nn.Parameter):
        raise CaptureError(f"another tensor is in the place of parameter {name} (torch.func.functional_call)")
    if not isinstance(parameter, DTensor):
        return None
    if name not in layouts:  # a step has assigned it to another name
        named = module.named_parameters(remove_duplicate=False)
        name = next((own for own, other in named if other is parameter and own in layouts), name)
    if name not in layouts:
        raise CaptureError(f"parameter {name} was made in shards after training began: make it before")
    return layouts[name]


def static_leaves(leaves: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Leaves that are no tensors, by the names that the captured step knows them by."""
    return leaf_counters({i: leaf for i, (_, leaf) in enumerate(leaves) if not isinstance(leaf, Tensor)})


@contextlib.contextmanager
def errors_of_the_step() -> Iterator[None]:
    """What is raised inside and is not ours is what the step itself has raised, unless a rank is gone."""
    try:
        yield
    except AutoParallelError:
        raise
    except Exception as error:
        if is_lost_connection(error):
            raise
        raise StepFailedError(f"{type(error).__name__}: {error}") from error


def decides_often(guard: Guard, variants: int, name: str) -> str:
    """The error for a step of which another value of ``guard`` is another graph, again and again."""
    return (
        f"{guard.source} decides by `{guard.text}` differently at nearly every step: {variants} variants of {name} "
        "were captured; compute it on tensors, or raise max_captures"
    )
