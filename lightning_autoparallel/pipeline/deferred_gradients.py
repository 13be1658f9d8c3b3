"""Gradients of several micro-batches, reduced once, when the optimizer steps.

While ``active``, steps leave each parameter's gradient as a partial sum on the axes that wait (``apply.unreduced``):
``parameter.grad`` is a DTensor that says so, adds up rank by rank, and is reduced by whoever looks at it as a whole.
What is unreduced at the end is reduced by a graph of its own, whose collectives go through the same passes as a step's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from lightning_autoparallel.apply import ParameterLayout, UnreducedLayout
from lightning_autoparallel.compile import Wiring, run_step
from lightning_autoparallel.contracts import (
    CapturedGraph,
    CompiledStep,
    GraphInput,
    GraphOutput,
    NodePlacement,
    PlanReport,
    ShardingPlan,
)
from lightning_autoparallel.pipeline.stages import StageContext, finish_step
from lightning_autoparallel.plan.planner import joint_axes
from lightning_autoparallel.torch_compat.autograd import has_hooks
from lightning_autoparallel.torch_compat.dtensors import laid_out_as
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode

NAME = "gradient_reduction"
_PORTION_BYTES = 2**29


@dataclass
class DeferredGradients:
    """One module's gradients; ``active`` is set around steps whose gradients wait."""

    module: nn.Module
    context: StageContext
    device: torch.device
    reports: dict[str, PlanReport]
    active: bool = False
    _parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    _layouts: dict[str, UnreducedLayout] = field(default_factory=dict)
    _reductions: dict[tuple[str, ...], tuple[CompiledStep, Wiring]] = field(default_factory=dict)

    def place(self, layouts: Mapping[str, ParameterLayout]) -> None:
        """Parameters lie as ``layouts`` say: those that wait are known from here on."""
        every = self.context.config.reduce_every_micro_batch
        self.forget()
        self._parameters = dict(self.module.named_parameters())
        found = {
            name: UnreducedLayout.of(layout, lambda axis, is_whole: every is False or is_whole)
            for name, layout in layouts.items()
            if every is not True
        }
        self._layouts = {name: layout for name, layout in found.items() if layout is not None}

    def forget(self) -> None:
        """Parameters lie in shards no longer."""
        self._parameters, self._layouts, self._reductions = {}, {}, {}

    def note(self) -> str:
        """What a report says of them."""
        trained = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        waiting = self.waiting()
        kept = sum(self._size_bytes(name) for name in trained if name in waiting)
        rest = [name for name in trained if name not in waiting]
        whole = sum(trained[name].numel() * trained[name].element_size() for name in rest)
        said = f"accumulated gradients of {len(trained) - len(rest)} parameters ({kept / 1e6:.3g} MB on each rank) are "
        said += "reduced once, when the optimizer steps"
        if not rest:
            return said
        return (
            f"{said}; those of {len(rest)} are reduced in every micro-batch (unreduced, which reduce_every_micro_batch="
            f"False allows where no hook is given them, they would take up to {whole / 1e6:.3g} MB on each rank)"
        )

    @property
    def may_wait(self) -> bool:
        """Whether several ranks add up gradients, and not in every micro-batch; known once parameters are placed."""
        if not self._parameters:
            return False
        return self.context.config.reduce_every_micro_batch is not True and self.context.mesh.data_parallel_size > 1

    def waiting(self) -> dict[str, UnreducedLayout]:
        """The parameters whose gradients a step would leave unreduced now, by name; hooks are given reduced ones."""
        if not self.active:
            return {}
        return {name: layout for name, layout in self._layouts.items() if not has_hooks(self._parameters[name])}

    def addend(self, parameter: Tensor, gradient: DTensor) -> DTensor:
        """A reduced gradient of ``parameter`` as steps give it now."""
        if not self.active:
            return gradient
        name = next((name for name in self._layouts if self._parameters[name] is parameter), "")
        layout = self.waiting().get(name)
        return gradient if layout is None else layout.addend(gradient)

    def prepare(self) -> None:
        """Before a backward: what is there already must add up with what comes, without anything being sent."""
        for name, layout in self.waiting().items():
            parameter = self._parameters[name]
            if isinstance(parameter.grad, DTensor):
                parameter.grad = layout.addend(parameter.grad)

    @property
    def owed(self) -> bool:
        """Whether this rank has a gradient that is not reduced."""
        return any(True for _ in self._unreduced())

    def reduce(self, agree: bool) -> dict[str, int]:
        """Reduce all that is not; every rank calls it. The collectives that it takes, by mesh axes.

        ``agree`` asks the other ranks, where they may have gradients of other parameters.
        """
        mine = set(self._unreduced())
        names = [name for name in self._layouts if name in mine]
        if agree and self._layouts:
            wanted = self.context.control.any([name in mine for name in self._layouts])
            names = [name for name, is_wanted in zip(self._layouts, wanted, strict=True) if is_wanted]
        if not names:
            return {}
        launched: Counter[str] = Counter()
        for some in self._portions(names):
            step, wiring = self._reduction(some)
            results = run_step(step, [self._taken(name) for name in some], wiring)
            for name, local in zip(some, results, strict=True):
                parameter, stored = self._parameters[name], self._layouts[name].stored
                parameter.grad = stored.distribute(laid_out_as(parameter, stored.unpadded(local)))
            launched.update(step.report.launches())
        return dict(launched)

    def _portions(self, names: Sequence[str]) -> list[tuple[str, ...]]:
        """What is reduced by one graph, which holds it twice; the same on all ranks."""
        portions: list[list[str]] = []
        filled = 0
        for name in names:
            size_bytes = self._size_bytes(name)
            if not portions or filled + size_bytes > _PORTION_BYTES:
                portions, filled = [*portions, []], 0
            portions[-1].append(name)
            filled += size_bytes
        return [tuple(portion) for portion in portions]

    def _size_bytes(self, name: str) -> int:
        return math.prod(self._layouts[name].unreduced.padded_shape) * self._parameters[name].element_size()

    def _unreduced(self) -> Iterator[str]:
        for name in self._layouts:
            gradient = self._parameters[name].grad
            if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
                yield name

    def _taken(self, name: str) -> Tensor:
        """This rank's addend, of which the parameter lets go; the memory is reused as soon as it is sent."""
        parameter, layout = self._parameters[name], self._layouts[name]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            shape = layout.unreduced.local_shape
            return layout.unreduced.padded(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
        assert isinstance(gradient, DTensor)
        return layout.unreduced.padded(layout.addend(gradient).to_local()).contiguous()

    def _reduction(self, names: tuple[str, ...]) -> tuple[CompiledStep, Wiring]:
        if names not in self._reductions:
            dtypes = [self._parameters[name].dtype for name in names]
            layouts = [self._layouts[name] for name in names]
            captured, plan = _graph_of(names, dtypes, layouts, self.device, self.context)
            step = finish_step(captured, plan, self.context, self.device, compiles=False)
            self._reductions[names] = step, Wiring.of(step.partitioned, [None] * len(names))
            self.reports[NAME] = step.report
        return self._reductions[names]


def _graph_of(
    names: Sequence[str],
    dtypes: Sequence[torch.dtype],
    layouts: Sequence[UnreducedLayout],
    device: torch.device,
    context: StageContext,
) -> tuple[CapturedGraph, ShardingPlan]:
    """The program that returns what it is given: placed as unreduced gradients, then as parameters."""
    graph, fake_mode = fx.Graph(), FakeTensorMode()
    nodes = [graph.placeholder(f"gradient_{i}") for i in range(len(names))]
    for node, dtype, layout in zip(nodes, dtypes, layouts, strict=True):
        with fake_mode:
            node.meta["val"] = torch.empty(layout.stored.shape, dtype=dtype, device=device)
    graph.output(nodes)
    captured = CapturedGraph(
        name=NAME,
        graph_module=fx.GraphModule(nn.Module(), graph),
        inputs=tuple(GraphInput(kind="batch", name=name) for name in names),
        outputs=tuple(GraphOutput(kind="output", name=str(i)) for i in range(len(names))),
        output_spec=None,
    )
    axes = layouts[0].stored.axes
    placed = {node.name: layout.unreduced.placements for node, layout in zip(nodes, layouts, strict=True)}
    plan = ShardingPlan(
        name=NAME,
        axes=axes,
        nodes={name: NodePlacement(inputs=(), outputs=(placements,)) for name, placements in placed.items()},
        parameters={},
        outputs=tuple(layout.stored.placements for layout in layouts),
        joint_axes=joint_axes(axes, context.mesh),
    )
    return captured, plan
