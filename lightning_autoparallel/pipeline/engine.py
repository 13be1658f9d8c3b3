"""``StepEngine``: shards a module, captures its steps as they come, and runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_autoparallel.apply import (
    ParameterLayout,
    Replacements,
    UnreducedLayout,
    attached_kept,
    check_initialised,
    copies_of,
    followers,
    gather_module,
    lie_anew,
    materialise_module,
    parameter_layouts,
    rebind_held,
    shard_copy,
    shard_module,
    share_buffers,
    take_whole_tensors,
)
from lightning_autoparallel.capture import (
    BatchLayout,
    ModuleStates,
    Numbers,
    StepRequest,
    StepState,
    Structures,
    TensorSpec,
    Watcher,
    check_rows,
    check_same_leaves,
    describe_batch,
    describe_call,
    exact_repeats,
    flatten_batch,
    ragged_part,
    row_positions,
)
from lightning_autoparallel.capture.randomness import generators_kept
from lightning_autoparallel.contracts import CompiledStep, PlanReport
from lightning_autoparallel.errors import CaptureError, ConfigError, TooManyCapturesError
from lightning_autoparallel.pipeline.agreed_calls import Agreement, Taken, check_agreement, check_shared_rows
from lightning_autoparallel.pipeline.backward_calls import BackwardCalls
from lightning_autoparallel.pipeline.buffers import AgreedBuffers
from lightning_autoparallel.pipeline.deferred_gradients import DeferredGradients
from lightning_autoparallel.pipeline.found_plan import OverBudgetError, find_plan
from lightning_autoparallel.pipeline.kept_shards import make_whole_before_loading
from lightning_autoparallel.pipeline.local_calls import call_state, named_state, records_gradients
from lightning_autoparallel.pipeline.optimizer_state import names_by_id, optimizer_state
from lightning_autoparallel.pipeline.plan_of_calls import context_of
from lightning_autoparallel.pipeline.ready_step import ReadyStep
from lightning_autoparallel.pipeline.seeds import Draws
from lightning_autoparallel.pipeline.shared_leaves import SharedLeaves
from lightning_autoparallel.pipeline.stages import StageContext, build_step
from lightning_autoparallel.pipeline.step_calls import (
    Around,
    PreparedStep,
    StepCall,
    StepResult,
    Variant,
    decides_often,
    errors_of_the_step,
    layout_of,
    pinned_edges,
    static_leaves,
)
from lightning_autoparallel.pipeline.steps_ahead import StepsAhead
from lightning_autoparallel.plan.parameter_storage import place_parameters
from lightning_autoparallel.plan.planner import plan_axes


@dataclass
class StepEngine:
    """Holds one module's captured steps; ``draws`` has the seeds of those that draw random numbers."""

    module: nn.Module
    context: StageContext
    device: torch.device
    traced_on: torch.device | None = None  # where a step's tensors lie that is only planned, unless it is ``device``
    batch_dims: int | Mapping[str, int | None] | None = None
    draws: Draws = field(default_factory=Draws)
    layouts: dict[str, ParameterLayout] = field(default_factory=dict)
    reports: dict[str, PlanReport] = field(default_factory=dict)
    replacements: Replacements = field(default_factory=Replacements)
    deferred: DeferredGradients = field(init=False)
    buffers: AgreedBuffers = field(default_factory=AgreedBuffers)
    optimizers: Callable[[], Iterable[Optimizer]] = tuple  # what keeps state of the parameters
    stand_ins: Callable[[], Mapping[int, str]] = dict  # names of what optimizers have in parameters' place, by id
    placed: Callable[[], None] = lambda: None  # called when parameters lie elsewhere than before
    _variants: dict[Any, list[Variant]] = field(default_factory=dict)
    _captures: dict[str, int] = field(default_factory=dict)
    backwards: BackwardCalls | None = None  # where ranks agree on the backwards of calls
    modes: ModuleStates | None = None  # of the module, as of the step that is ready
    _copies: list[nn.Module] = field(default_factory=list)  # that are sharded, too
    _holders: list[Any] = field(default_factory=list)  # of copies and parameters, beside the module
    _hooks: list[RemovableHandle] = field(default_factory=list)  # of modules that are sharded
    _checked: Any = None  # what the module was made of when its parameters were looked at
    _structures: dict[str, Structures] = field(default_factory=dict)  # of module calls, by path
    _numbers: dict[str, frozenset[Any]] = field(default_factory=dict)  # places whose numbers steps are fed

    def __post_init__(self) -> None:
        self.deferred = DeferredGradients(self.module, self.context, self.device, self.reports)
        self.ahead, self.shared, self._codes = StepsAhead(self), SharedLeaves(self.context, self.batch_dims), Numbers()

    @property
    def constants(self) -> list[Tensor]:
        """Tensors that captured steps were found to make out of nothing."""
        return [value for known in self._variants.values() for variant in known for value in variant.step.constants]

    def shard_parameters(self, given: Container[str] = ()) -> None:
        """Make every parameter a DTensor of its planned placement on the engine's device; meta ones are initialised.

        Args:
            given: tensors on meta that get room only, as their values come later, by all of their names.

        Raises:
            ConfigError: a submodule on meta cannot initialise itself, one is lazy and has no parameters yet, or a rule
                does not fit the module.
        """
        check_initialised(self.module)
        self.context.found.forget_others(self.module)
        self.context.found.calls.forget()
        self.layouts = self._planned_layouts()
        with attached_kept(self.module):
            materialise_module(self.module, self.layouts, self.device, given)
            shard_module(self.module, self.layouts, self.device, self.replacements)
            self.module.to(self.device)  # other tensors than parameters, and what modules do besides
        lie_anew([self.module], self.layouts, self.optimizers())  # shards that another strategy has left
        self.deferred.place(self.layouts)
        self._hooks += take_whole_tensors(self.module)
        share_buffers(self.module)
        self.buffers.are(self.module.named_buffers())
        self._rebind_held()

    def _planned_layouts(self) -> dict[str, ParameterLayout]:
        plan, mesh = self.context.plan, self.context.mesh
        axes = plan_axes(plan, mesh)
        shapes = {name: tuple(parameter.shape) for name, parameter in self.module.named_parameters()}
        placements = place_parameters(self.context.matching_plan(shapes), shapes, axes, self.context.warn)
        storage = {name: placement.storage for name, placement in placements.items()}
        return parameter_layouts(self.module, mesh.mesh_of(axes), axes, storage)

    def place_anew(self) -> None:
        """Move parameters, and what is kept of them, to where the plan has them now; nothing is captured any more."""
        self.forget_captures()
        if any(isinstance(parameter, DTensor) for parameter in self.module.parameters()):
            self.layouts = self._planned_layouts()
            with self.context.progress.stage("move parameters to where the plan has them"):
                lie_anew([self.module, *self._copies], self.layouts, self.optimizers())
            self.deferred.place(self.layouts)

    def shard_copies(self, holders: Iterable[Any]) -> None:
        """Shard copies of the module that ``holders`` keep in their attributes, as it is sharded itself.

        Parameters of the module that they keep are those in shards from now on.
        """
        self._holders = list(holders)
        self._copies = copies_of(self.module, self._holders)
        for copy in self._copies:
            shard_copy(copy, self.layouts, self.device)
            self._hooks += take_whole_tensors(copy)
        self._rebind_held()

    def _rebind_held(self) -> None:
        rebind_held([*self.module.modules(), *self._holders], self.replacements)

    def gather_parameters(self) -> None:
        """Undo ``shard_parameters``: whole parameters on the host of every rank; what was captured is kept."""
        for module in (self.module, *self._copies):
            gather_module(module, self.replacements)
            make_whole_before_loading(module, self.context.control)
        for hook in self._hooks:
            hook.remove()
        self._copies, self._hooks, self._checked, self._captures = [], [], None, {}
        self.ahead.forget()
        self.deferred.forget()
        self._rebind_held()

    def forget_captures(self) -> None:
        """The module is made of other parameters: what was captured of it is nothing that could run."""
        for known in (self.layouts, self._variants, self._captures, self._structures, self._numbers):
            known.clear()  # type: ignore[attr-defined]
        self.modes = self._checked = None
        self.ahead.forget()

    def prepare(self, call: StepCall, batch: Any, counters: Mapping[str, int]) -> PlanReport:
        """Capture ``call`` for batches like this local one, without running it."""
        leaves, rebuild = flatten_batch(batch)
        call, layout = self._described(call, batch, leaves)
        return self._variant(call, layout, leaves, rebuild, counters).step.report

    def find(self, call: StepCall, leaves: Sequence[tuple[str, Any]]) -> PreparedStep | None:
        """The step captured for a batch of such leaves, of which only shapes are read; None, on all ranks, if none is.

        Raises:
            ConfigError: this rank has no such step, and others are about to run one.
        """
        layout, state = describe_batch(leaves, self.batch_dims), self._state(call)
        known = self._variants.get((call.name, layout, state, frozenset(self._waiting(call))), [])
        index = next((i for i, variant in enumerate(known) if variant.holds(static_leaves(leaves))), None)
        if index is None:
            check_agreement(self.context, call, layout, [], -1, state)
            return None
        step, layouts = known[index].step, known[index].layouts
        return PreparedStep(call=call, layout=layout, index=index, module_state=state, step=step, layouts=layouts)

    def check_prepared(self, prepared: PreparedStep, batch: Sequence[Tensor | None]) -> None:
        """Compare ranks before a prepared step runs; ``batch`` has its tensors in order, None for unknown ones.

        Raises:
            ConfigError: ranks hold batches of different shapes, or different values of a replicated leaf.
            CaptureError: ranks took different branches, or froze different parameters.
        """
        leaves = [(own.path, one) for own, one in zip(prepared.layout.tensors, batch, strict=True) if one is not None]
        check_agreement(self.context, prepared.call, prepared.layout, leaves, prepared.index, prepared.module_state)

    def execute(
        self, call: StepCall, batch: Any, counters: Mapping[str, int], around: Around = contextlib.nullcontext
    ) -> StepResult:
        """Run one step on this rank's ``batch``, inside ``around()``; every rank calls it alike.

        Raises:
            ConfigError: ranks hold batches of different shapes, or different values of a replicated leaf.
            CaptureError: the step cannot be captured, or changes with every batch.
            RanksDifferError: ranks call a module with arguments of different shapes; all raise it, and nothing has run.
        """
        return self.ready(call, batch, counters).run(around)

    def ready(self, call: StepCall, batch: Any, counters: Mapping[str, int]) -> ReadyStep:
        """The same, up to where the step runs; nothing has happened where this raises."""
        leaves, rebuild = flatten_batch(batch)
        call, layout = self._described(call, batch, leaves)
        ahead: list[Callable[[], Agreement]] = []
        variant = self._variant(call, layout, leaves, rebuild, counters, ahead=ahead)
        self.context.found.note(call, variant.step.captured)
        ready = partial(ReadyStep, layout=layout, leaves=leaves, rebuild=rebuild, counters=counters)
        return ready(engine=self, call=call, variant=variant, begin=ahead[0] if ahead else None)

    def _described(self, call: StepCall, batch: Any, leaves: Sequence[tuple[str, Any]]) -> tuple[StepCall, BatchLayout]:
        if not call.local:
            return call, describe_batch(leaves, {"*": None} if call.common else self.batch_dims)
        training = call.training and records_gradients(self._owner(call), [leaf for _, leaf in leaves])
        name = call.name if training else f"{call.name}:inference"
        return replace(call, training=training, name=name), describe_call(batch, self.device, training)

    def _owner(self, call: StepCall) -> nn.Module:
        return self.module.get_submodule(call.path)

    def _variant(
        self,
        call: StepCall,
        layout: BatchLayout,
        leaves: Sequence[tuple[str, Any]],
        rebuild: Callable[[list[Any]], Any],
        counters: Mapping[str, int],
        planned: StepRequest | None = None,  # what a plan was found for
        ahead: list[Callable[[], Agreement]] | None = None,  # takes how ranks agree on a step that may run before
    ) -> Variant:
        key = (call.name, layout, state := self._state(call), frozenset(self._waiting(call)))
        known = self._variants.setdefault(key, [])
        found = {**counters, **static_leaves(leaves)}
        index = next((i for i, variant in enumerate(known) if variant.holds(found)), len(known))
        is_watched = index == len(known) or self.shared.are_watched(call, layout)
        if ahead is not None and not is_watched and self.ahead.may((key, index)):
            taken = self._taken(call, known[index], found)
            ahead.append(partial(self.ahead.begin, call, layout, leaves, index, state, taken))
            return known[index]
        agree = partial(check_agreement, self.context, call, layout, leaves, index, state)
        agree(self._taken(call, known[index], found) if index < len(known) else None)
        if is_watched:
            self.shared.check(call, layout, leaves)
        if index == len(known):
            check_shared_rows(self.context, call, layout, leaves)
            if self.context.found.is_due(self.context, call):
                with errors_of_the_step(), generators_kept([]):
                    request = self.request(call, layout, leaves, rebuild, counters)
                    moving = followers(self.module, self.optimizers())
                    state = optimizer_state(self.optimizers(), {**names_by_id(self.module), **self.stand_ins()})
                    find_plan(self.context, request, moving, self.layouts, state)
                self.context.found.remember(self.module)
                self.place_anew()
                self.placed()
                return self._variant(call, layout, leaves, rebuild, counters, request)
            try:
                known.append(self._capture(call, layout, leaves, rebuild, counters, known, planned))
            except OverBudgetError as over:
                self.context.found.reopen(over)
                return self._variant(call, layout, leaves, rebuild, counters)
            if not call.local:
                agree(self._taken(call, known[index], found))
        if not call.local:
            self.ahead.agreed((key, index))
        return known[index]

    def _taken(self, call: StepCall, variant: Variant, found: Mapping[str, Any]) -> Taken | None:
        """What a step takes from outside of its batch, or which draws a call makes; None where ranks need not agree."""
        if self.context.control.alone:
            return None
        if call.local:
            shares = self.context.mesh.device_mesh.size() != self.context.mesh.data_parallel_size
            draws = shares and variant.step.has_random_ops
            return Taken(str(self.draws.next_of_call(self.device)), {}) if draws else None
        if self.modes is None:
            return None
        return Taken(variant.fed(found), self.buffers.changes(self.modes.buffers, variant.read_buffers))

    def _waiting(self, call: StepCall) -> dict[str, UnreducedLayout]:
        """Parameters whose gradients the call leaves unreduced."""
        return self.deferred.waiting() if call.trains else {}

    def forget(self, name: str) -> None:
        """Let go of all that was captured of a step, by whatever dataloader."""
        self._variants = {key: known for key, known in self._variants.items() if key[0].partition(".")[0] != name}
        self.ahead.forget()
        self._captures = {key: count for key, count in self._captures.items() if key.partition(".")[0] != name}

    def _module_state(self) -> Any:
        """What besides the batch changes the graph: modes of submodules, frozen parameters."""
        if self.modes is None:
            self.modes = ModuleStates(self.module)
        key = self.modes.key()
        self._check_parts(self.modes.parts)
        return key

    def _state(self, call: StepCall) -> Any:
        if not call.local:
            return self._module_state(), self._codes.number(call.code), call.seen_by_hooks
        owner = self._owner(call)
        structures = self._structures.setdefault(call.path, Structures())
        return structures.number(list(owner.modules())), call_state(owner, call.training, self.device)

    def check_parameters(self) -> None:
        """Whether all parameters are those that were sharded.

        Raises:
            ConfigError: one that trains has come later: it would differ between ranks, unnoticed.
        """
        self._module_state()

    def _check_parts(self, parts: Any) -> None:
        if parts == self._checked:
            return
        self._checked = parts
        for name, parameter in self.module.named_parameters():
            if self.layouts and parameter.requires_grad and not isinstance(parameter, DTensor):
                raise ConfigError(
                    f"parameter {name} was made or replaced after training had begun: ranks share out parameters "
                    "before that, and this one would train on each rank by itself; make it in __init__ or "
                    "configure_model"
                )

    def _capture(
        self,
        call: StepCall,
        layout: BatchLayout,
        leaves: Sequence[tuple[str, Any]],
        rebuild: Callable[[list[Any]], Any],
        counters: Mapping[str, int],
        known: list[Variant],
        planned: StepRequest | None = None,
    ) -> Variant:
        counts = self._say_capture(call, layout, known)
        request = planned or self.request(call, layout, leaves, rebuild, counters)
        with errors_of_the_step(), generators_kept([]):
            step = build_step(request, context_of(self.context, call), waiting := self._waiting(call))
        self._captures[call.name] = self._captures.get(call.name, 0) + counts  # those that failed are none
        if self.deferred.active and call.trains:
            step = replace(step, report=replace(step.report, notes=(*step.report.notes, self.deferred.note())))
        self.reports[call.name] = step.report
        state = request.state
        assert state is not None
        others = (None,) * (len(request.buffers) + len(layout.tensors) + state.needs_vector)
        lies = [waiting.get(name) or layout_of(self.module, self.layouts, name) for name in request.parameters]
        return Variant(step=step, state=state, effects=request.effects, layouts=(*lies, *others))

    def request(
        self,
        call: StepCall,
        layout: BatchLayout,
        leaves: Sequence[tuple[str, Any]],
        rebuild: Callable[[list[Any]], Any],
        counters: Mapping[str, int],
    ) -> StepRequest:
        """What is to be captured: ``call`` on a batch like this one.

        Raises:
            CaptureError: the batch cannot be divided into rows.
        """
        self._check_batch(call, leaves, rebuild)
        watcher = Watcher({**counters, **static_leaves(leaves)})
        state = StepState(self.module, watcher, self._numbers.get(call.name, frozenset()))
        effects = call.effects(watcher)

        def run(values: list[Any]) -> Any:
            batch = rebuild(values)
            output = call.run(batch, watcher)
            check_same_leaves(f"{state.entered}: {call.name}", batch, values)
            return output

        parameters, buffers = named_state(self.module, call.path)
        return StepRequest(
            name=call.name,
            module=self.module,
            run=run,
            parameters={name: TensorSpec.of(parameter) for name, parameter in parameters.items()},
            buffers={name: TensorSpec.of(buffer) for name, buffer in buffers.items()},
            layout=layout,
            static_leaves={i: leaf for i, (_, leaf) in enumerate(leaves) if not isinstance(leaf, Tensor)},
            batch_shards=1 if call.local else self.context.mesh.data_parallel_size,
            local=call.local,
            device=self.traced_on or self.device,
            effects=effects,
            training=call.training,
            loss_leaf=call.loss_leaf,
            seen_by_hooks=call.seen_by_hooks,
            state=state,
            notice=self.context.warn,
            edges=pinned_edges(self.context.plan, self.context.mesh, self.module),
        )

    def _check_batch(
        self, call: StepCall, leaves: Sequence[tuple[str, Any]], rebuild: Callable[[list[Any]], Any]
    ) -> None:
        """Whether the batch can be divided into rows by dim 0 of its tensors."""
        if call.local or call.common or self.context.mesh.data_parallel_size == 1:
            return
        ragged = ragged_part(rebuild([leaf for _, leaf in leaves]))
        if ragged is not None:
            raise CaptureError(
                f"the batch of {call.name} holds a {ragged}, whose tensors have no common dim for rows: it cannot "
                "be the rank's part of one global batch; pad rows to one length, and give the step dense tensors"
            )
        # Later kinds of batches may be what is left at an epoch's end.
        known = self.batch_dims is not None or call.name in self._captures
        doubt = None if known else check_rows(leaves, call.rows)
        if doubt is not None:
            self.context.warn_once(doubt)
        positions = None if self.batch_dims is not None else row_positions(leaves)
        if positions is not None:
            raise CaptureError(f"{call.name}: {positions}")

    def _other_kind(self, name: str, layout: BatchLayout) -> str:
        if any(key[:2] == (name, layout) and variants for key, variants in self._variants.items()):
            return "other modes of modules, or other frozen parameters"
        return f"a batch of another kind ({layout})"

    def _say_capture(self, call: StepCall, layout: BatchLayout, known: list[Variant]) -> bool:
        """Say that a step is captured again, and why; whether that counts. Refuse after ``max_captures`` of it."""
        differences = [found for variant in reversed(known) for found in variant.state.differences()]
        differences.sort(key=lambda found: not found.is_number)
        repeated = exact_repeats([variant.state.watcher.guards for variant in known])
        if repeated is not None:
            raise TooManyCapturesError(decides_often(repeated, len(known), call.name))
        numbers = {found.place.identity for found in differences if found.is_number and found.place is not None}
        fed = self._numbers.get(call.name, frozenset())
        self._numbers[call.name] = fed | numbers
        if numbers - fed and call.name in self._captures:
            self.context.warn(f"{call.name} is captured again: {differences[0]}; from now on an input of its graph")
            return False
        count, limit = self._captures.get(call.name, 0) + 1, self.context.config.max_captures
        if count <= limit:
            if count > 1:
                reason = "another branch" if known else self._other_kind(call.name, layout)
                guarded = [found for found in differences if found.place is None or found.place.identity not in fed]
                reason = f"{reason}: {guarded[0]}" if guarded else reason
                self.context.warn(f"{call.name} is captured again for {reason}: capture {count} of at most {limit}")
            return True
        guards = [guard for variant in known for guard in variant.state.watcher.guards]
        if guards and len(known) > 1:
            raise TooManyCapturesError(decides_often(guards[0], limit, call.name))
        if differences:
            raise TooManyCapturesError(
                f"{call.name} finds {differences[0]}: it differs at nearly every step, {limit} variants were captured"
            )
        raise TooManyCapturesError(
            f"{call.name} met more than max_captures={limit} kinds of batches, the last {layout}: pad them to a few "
            "shapes (pad_to_multiple_of for lengths, drop_last=True for rows), or raise max_captures"
        )

    def seeded(self, step: CompiledStep, local: bool = False) -> contextlib.AbstractContextManager[None]:
        """Random draws differ between batch shards and runs; those of a ``local`` call follow torch's generator."""
        if not step.has_random_ops:
            return contextlib.nullcontext()
        run = self.draws.of_call if local else self.draws.of_step
        return run(self.context.mesh.data_parallel_rank, self.device)
