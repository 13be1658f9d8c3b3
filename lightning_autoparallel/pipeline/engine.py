"""``StepEngine``: shards a module, captures its steps as they come, and runs them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_autoparallel.apply import ParameterLayout, materialise_module, parameter_layouts, shard_module
from lightning_autoparallel.capture import (
    BatchLayout,
    Guard,
    ModuleStates,
    StepEffects,
    StepRequest,
    StepState,
    TensorSpec,
    Watcher,
    check_edges,
    describe_batch,
    exact_repeats,
    flatten_batch,
    leaf_counters,
    made_again,
)
from lightning_autoparallel.compile import run_step
from lightning_autoparallel.contracts import CompiledStep, PlanReport
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.pipeline.agreement import StepIdentity, check_same_rows, check_same_step
from lightning_autoparallel.pipeline.results import take_apart, with_statics
from lightning_autoparallel.pipeline.stages import StageContext, build_step
from lightning_autoparallel.plan.named import plan_axes
from lightning_autoparallel.plan.storage import place_parameters
from lightning_autoparallel.torch_compat.tree import tree_unflatten

Around = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """A kind of step: ``run(batch, watcher)`` is the user's code, ``effects()`` a fresh recorder for one capture."""

    name: str
    run: Callable[[Any, Watcher], Any]
    effects: Callable[[Watcher], StepEffects]
    training: bool
    loss_leaf: Callable[[Any], Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one real step gave: its result, and the tensors that its recorded effects replay with.

    ``effect_whole`` says which of them are equal on all ranks; the others are this rank's rows. ``numbers`` are the
    counters and other numbers that the step found.
    """

    output: Any
    effects: StepEffects
    effect_tensors: tuple[Tensor, ...]
    effect_whole: tuple[bool, ...]
    step: CompiledStep
    numbers: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Variant:
    step: CompiledStep
    state: StepState
    effects: StepEffects
    layouts: tuple[ParameterLayout | None, ...]

    def holds(self, counters: Mapping[str, Any]) -> bool:
        return self.state.holds(self.state.values(counters))

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
    layouts: tuple[ParameterLayout | None, ...]


@dataclass
class StepEngine:
    """Holds one module's captured steps; ``draws`` numbers the steps that drew random numbers, for their seeds."""

    module: nn.Module
    context: StageContext
    device: torch.device
    batch_dims: int | Mapping[str, int | None] | None = None
    seed: int = 0
    draws: int = 0
    layouts: dict[str, ParameterLayout] = field(default_factory=dict)
    reports: dict[str, PlanReport] = field(default_factory=dict)
    _variants: dict[Any, list[_Variant]] = field(default_factory=dict)
    _captures: dict[str, int] = field(default_factory=dict)
    _modes: ModuleStates | None = None
    _numbers: dict[str, frozenset[Any]] = field(default_factory=dict)  # places whose numbers steps are fed

    @property
    def random_state(self) -> dict[str, int]:
        """What the next random draws follow from: kept in checkpoints, so that a resumed run draws on."""
        return {"seed": self.seed, "draws": self.draws}

    @random_state.setter
    def random_state(self, state: Mapping[str, int]) -> None:
        self.seed, self.draws = state.get("seed", self.seed), state.get("draws", self.draws)

    def shard_parameters(self) -> None:
        """Make every parameter a DTensor of its planned placement on the engine's device; meta ones are initialised.

        Raises:
            ConfigError: a submodule on meta cannot initialise itself, or a rule does not fit the module.
        """
        plan, mesh = self.context.config.plan, self.context.mesh
        axes = plan_axes(plan, mesh)
        shapes = {name: tuple(parameter.shape) for name, parameter in self.module.named_parameters()}
        placements = place_parameters(plan, shapes, axes, self.context.warn)
        storage = {name: placement.storage for name, placement in placements.items()}
        self.layouts = parameter_layouts(self.module, mesh.mesh_of(axes), axes, storage)
        materialise_module(self.module, self.layouts, self.device)
        shard_module(self.module, self.layouts, self.device)
        self.module.to(self.device)

    def prepare(self, call: StepCall, batch: Any, counters: Mapping[str, int]) -> PlanReport:
        """Capture ``call`` for batches like this local one, without running it."""
        leaves, rebuild = flatten_batch(batch)
        return self._variant(call, leaves, rebuild, counters).step.report

    def find(self, call: StepCall, leaves: Sequence[tuple[str, Any]]) -> PreparedStep | None:
        """The step captured for a batch of such leaves, of which only shapes are read; None, on all ranks, if none is.

        Raises:
            ConfigError: this rank has no such step, and others are about to run one.
        """
        layout, state = describe_batch(leaves, self.batch_dims), self._module_state()
        known = self._variants.get((call.name, layout, state), [])
        index = next((i for i, variant in enumerate(known) if variant.holds(_static(leaves))), None)
        if index is None:
            self._check_agreement(call, layout, [], -1, state)
            return None
        step, layouts = known[index].step, known[index].layouts
        return PreparedStep(call=call, layout=layout, index=index, module_state=state, step=step, layouts=layouts)

    def check_prepared(self, prepared: PreparedStep, batch: Sequence[Tensor | None]) -> None:
        """Compare ranks before a prepared step runs; ``batch`` has its tensors in order, None for unknown ones.

        Raises:
            ConfigError: ranks hold batches of different shapes, or different values of a replicated leaf.
            CaptureError: ranks took different branches, or froze different parameters.
        """
        paths = [leaf.path for leaf in prepared.layout.tensors]
        leaves = [(path, leaf) for path, leaf in zip(paths, batch, strict=True) if leaf is not None]
        self._check_agreement(prepared.call, prepared.layout, leaves, prepared.index, prepared.module_state)

    def execute(
        self, call: StepCall, batch: Any, counters: Mapping[str, int], around: Around = contextlib.nullcontext
    ) -> StepResult:
        """Run one step on this rank's ``batch``, inside ``around()``; every rank calls it alike.

        Raises:
            ConfigError: ranks hold batches of different shapes, or different values of a replicated leaf.
            CaptureError: the step cannot be captured, or changes with every batch.
        """
        leaves, rebuild = flatten_batch(batch)
        variant = self._variant(call, leaves, rebuild, counters)
        state = variant.state
        numbers, found = state.values({**counters, **_static(leaves)}), state.writes.prepare()
        tensors = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
        parameters, buffers = dict(self.module.named_parameters()), dict(self.module.named_buffers())
        inputs = [*parameters.values(), *buffers.values(), *tensors]
        if state.needs_vector:
            fed = state.watcher.numbers(numbers)
            inputs.append(torch.tensor(fed, dtype=torch.float64).to(self.device, non_blocking=True))
        with self.seeded(variant.step), around():
            results = run_step(variant.at_this_step(), inputs, variant.layouts)
        return self._distribute(
            variant, results, buffers, numbers, lambda given: state.writes.replay(given, numbers, found, tensors)
        )

    def _distribute(
        self,
        variant: _Variant,
        results: list[Tensor],
        buffers: Mapping[str, Tensor],
        numbers: Mapping[str, Any],
        replay: Callable[[list[Tensor]], None],
    ) -> StepResult:
        captured, writes = variant.step.captured, variant.state.writes
        outputs, effects = take_apart(captured, results, buffers)
        logged = len(effects) - len(writes.tensors)
        replay([tensor.detach() for tensor in effects[logged:]])
        statics = {i: made_again(leaf, numbers) for i, leaf in captured.static_outputs.items()}
        return StepResult(
            output=tree_unflatten(with_statics(outputs, statics), captured.output_spec),
            effects=variant.effects,
            effect_tensors=tuple(effects[:logged]),
            effect_whole=_whole_effects(variant.step)[:logged],
            step=variant.step,
            numbers=numbers,
        )

    def _variant(
        self,
        call: StepCall,
        leaves: Sequence[tuple[str, Any]],
        rebuild: Callable[[list[Any]], Any],
        counters: Mapping[str, int],
    ) -> _Variant:
        layout = describe_batch(leaves, self.batch_dims)
        state = self._module_state()
        key = (call.name, layout, state)
        known = self._variants.setdefault(key, [])
        found = {**counters, **_static(leaves)}
        index = next((i for i, variant in enumerate(known) if variant.holds(found)), len(known))
        self._check_agreement(call, layout, leaves, index, state)
        if index == len(known):
            self._check_shared_rows(layout, leaves)
            known.append(self._capture(call, layout, leaves, rebuild, counters, known))
        return known[index]

    def _module_state(self) -> Any:
        """What besides the batch changes the graph: modes of submodules, frozen parameters."""
        if self._modes is None:
            self._modes = ModuleStates(self.module)
        return self._modes.key()

    def _check_agreement(
        self, call: StepCall, layout: BatchLayout, leaves: Sequence[tuple[str, Any]], variant: int, state: Any
    ) -> None:
        batched = {leaf.path for leaf in layout.leaves if leaf.batched}
        values = {path: _digest(leaf) for path, leaf in leaves if isinstance(leaf, Tensor) and path not in batched}
        values |= {path: repr(leaf) for path, leaf in leaves if type(leaf) in (int, float)}
        check_same_step(
            self.context.control,
            StepIdentity(name=call.name, batch=str(layout), values=values, variant=variant, module_state=repr(state)),
        )

    def _check_shared_rows(self, layout: BatchLayout, leaves: Sequence[tuple[str, Any]]) -> None:
        """Once per kind of batch: ranks that other axes than dp_* tell apart hold the same rows."""
        mesh = self.context.mesh
        if mesh.device_mesh.size() == mesh.data_parallel_size:
            return
        batched = {leaf.path for leaf in layout.leaves if leaf.batched}
        digests = {path: _digest(leaf) for path, leaf in leaves if path in batched}
        check_same_rows(self.context.control, mesh.data_parallel_rank, digests)

    def _capture(
        self,
        call: StepCall,
        layout: BatchLayout,
        leaves: Sequence[tuple[str, Any]],
        rebuild: Callable[[list[Any]], Any],
        counters: Mapping[str, int],
        known: list[_Variant],
    ) -> _Variant:
        self._count_capture(call, layout, known)
        watcher = Watcher({**counters, **_static(leaves)})
        state = StepState(self.module, watcher, self._numbers.get(call.name, frozenset()))
        effects = call.effects(watcher)

        def run(values: list[Any]) -> Any:
            return call.run(rebuild(values), watcher)

        request = StepRequest(
            name=call.name,
            module=self.module,
            run=run,
            parameters={name: TensorSpec.of(parameter) for name, parameter in self.module.named_parameters()},
            buffers={name: TensorSpec.of(buffer) for name, buffer in self.module.named_buffers()},
            layout=layout,
            static_leaves={i: leaf for i, (_, leaf) in enumerate(leaves) if not isinstance(leaf, Tensor)},
            batch_shards=self.context.mesh.data_parallel_size,
            device=self.device,
            effects=effects,
            training=call.training,
            loss_leaf=call.loss_leaf,
            state=state,
            notice=self.context.warn,
            edges=self._edges(),
        )
        step = build_step(request, self.context)
        self.reports[call.name] = step.report
        others = (None,) * (len(request.buffers) + len(layout.tensors) + state.needs_vector)
        names = list(request.parameters)
        return _Variant(
            step=step, state=state, effects=effects, layouts=(*(self._layout_of(name) for name in names), *others)
        )

    def _edges(self) -> tuple[tuple[str, str], ...]:
        """Where rules pin values at the edges of modules, on axes that the mesh has."""
        plan, mesh = self.context.config.plan, self.context.mesh
        edges = tuple((rule.kind, rule.pattern) for rule in plan.rules if rule.kind != "parameter")
        check_edges(self.module, edges)
        active = mesh.active(mesh.spec.names)
        return tuple(
            (rule.kind, rule.pattern)
            for rule in plan.rules
            if rule.kind != "parameter" and any(axis in active for axis, _ in rule.placements)
        )

    def _layout_of(self, name: str) -> ParameterLayout | None:
        parameter = self.module.get_parameter(name)
        return self.layouts[name] if isinstance(parameter, DTensor) else None

    def _count_capture(self, call: StepCall, layout: BatchLayout, known: list[_Variant]) -> None:
        differences = sorted(
            (found for variant in reversed(known) for found in variant.state.differences()),
            key=lambda found: not found.is_number,
        )
        repeated = exact_repeats([variant.state.watcher.guards for variant in known])
        if repeated is not None:
            raise CaptureError(_decides(repeated, len(known), call.name))
        numbers = {found.place.identity for found in differences if found.is_number and found.place is not None}
        fed = self._numbers.get(call.name, frozenset())
        self._numbers[call.name] = fed | numbers
        if numbers - fed and call.name in self._captures:
            self.context.warn(f"{call.name} is captured again: {differences[0]}; from now on an input of its graph")
            return
        count = self._captures[call.name] = self._captures.get(call.name, 0) + 1
        limit = self.context.config.max_captures
        if count <= limit:
            if count > 1:
                reason = "another branch" if known else f"a batch of another kind ({layout})"
                guarded = [found for found in differences if found.place is None or found.place.identity not in fed]
                reason = f"{reason}: {guarded[0]}" if guarded else reason
                self.context.warn(f"{call.name} is captured again for {reason}: capture {count} of at most {limit}")
            return
        guards = [guard for variant in known for guard in variant.state.watcher.guards]
        if guards:
            raise CaptureError(_decides(guards[0], limit, call.name))
        raise CaptureError(
            f"{call.name} met more than max_captures={limit} kinds of batches, the last {layout}: pad batches to a few "
            "shapes, or raise max_captures"
        )

    @contextlib.contextmanager
    def seeded(self, step: CompiledStep) -> Iterator[None]:
        """Random draws of a step differ between batch shards and steps, and leave the user's generators alone."""
        if not step.has_random_ops:
            yield
            return
        self.draws += 1
        text = f"{self.seed} {self.draws} {self.context.mesh.data_parallel_rank}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            yield


def _decides(guard: Guard, variants: int, name: str) -> str:
    return (
        f"{guard.source} decides by `{guard.text}` differently at nearly every step: {variants} variants of {name} "
        "were captured; compute it on tensors, or raise max_captures"
    )


def _static(leaves: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Leaves that are no tensors, by the names that the captured step knows them by."""
    return leaf_counters({i: leaf for i, (_, leaf) in enumerate(leaves) if not isinstance(leaf, Tensor)})


def _whole_effects(step: CompiledStep) -> tuple[bool, ...]:
    sharded = step.partitioned.sharded
    pairs = zip(sharded.outputs, sharded.output_placements, strict=True)
    return tuple(all(p.is_replicate() for p in placements or ()) for item, placements in pairs if item.kind == "log")


def _digest(tensor: Tensor) -> str:
    return (
        hashlib.blake2b(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
        if tensor.numel()
        else ""
    )
