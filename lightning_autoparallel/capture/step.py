"""``capture_step``: run a step once on fake tensors of the global batch and return its joint graph."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autoparallel.capture.batch import BatchLayout, BatchLeaf
from lightning_autoparallel.capture.call_layouts import capture_failed, check_constants, own_results
from lightning_autoparallel.capture.changed_inputs import changes_input, check_outputs, line_of
from lightning_autoparallel.capture.data_dependence import data_dependent
from lightning_autoparallel.capture.decompositions import planning_decompositions
from lightning_autoparallel.capture.edges import marked_edges
from lightning_autoparallel.capture.effects import StepEffects, undone_afterwards
from lightning_autoparallel.capture.kept_totals import (
    Shown,
)
from lightning_autoparallel.capture.leaf_stand_ins import Unread, stand_in_for_leaf
from lightning_autoparallel.capture.normalize import normalize_graph
from lightning_autoparallel.capture.region_writes import RegionWrites, check_whole_calls
from lightning_autoparallel.capture.repeats import repeated_blocks
from lightning_autoparallel.capture.row_results import Shapes, batch_dims_of
from lightning_autoparallel.capture.rows_of_all import check_as_on_one_rank
from lightning_autoparallel.capture.sources import record_sources
from lightning_autoparallel.capture.stand_ins import without_stand_ins
from lightning_autoparallel.capture.state import StepState
from lightning_autoparallel.capture.traced_blocks import RepeatedBlocks
from lightning_autoparallel.capture.watch import MOST_FED, NeedsClones, NeedsNumbers, NeedsVector, StartOver
from lightning_autoparallel.contracts import CapturedGraph, GraphInput, GraphOutput, OutputKind
from lightning_autoparallel.errors import AutoParallelError, CaptureError
from lightning_autoparallel.fx import nodes as fxn
from lightning_autoparallel.torch_compat.autograd import backwards_inside
from lightning_autoparallel.torch_compat.block_operators import UnrepeatableBackwardError
from lightning_autoparallel.torch_compat.constants import whole_lists_of_constants
from lightning_autoparallel.torch_compat.distributions import unchecked_distributions
from lightning_autoparallel.torch_compat.mkldnn import mkldnn_off
from lightning_autoparallel.torch_compat.regions import visible_checkpoint_regions
from lightning_autoparallel.torch_compat.tracing import (
    DATA_DEPENDENT_ERRORS,
    JointExport,
    MutatedInputError,
    OrderedCallError,
    collection_paused,
    export_joint,
    fake_tensor_like,
    fake_tracing,
    mark_parameter,
    pretend_compiling,
)
from lightning_autoparallel.torch_compat.tree import tree_flatten, tree_map

NUMBERS = "the step's numbers"  # the name of the graph's input for them


_MOST_STARTS = 32  # of one capture: each run tells what the next one is to be given


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """The global geometry of a parameter or buffer: all that capture needs to know of it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of a tensor; of a DTensor its global one."""
        return cls(
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=tensor.dtype,
            requires_grad=tensor.requires_grad,
        )


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """What to capture: ``run(leaves)`` is the step on the batch's leaves, ``module`` owns the state that it reads.

    ``loss_leaf`` picks, of the result's flattened leaves, the loss to differentiate; None differentiates every result.
    ``edges`` are ("outputs" | "inputs", glob over paths of submodules): what passes there is marked in the graph.
    With ``repeat_blocks`` one of several equal submodules is traced for all of them, where nothing tells them apart.
    ``local`` is a module call on one rank's rows: shapes stay as they are, and leaves may require gradients.
    What the step keeps and returns may be ``seen_by_hooks``. ``state`` is told what the step's Python reads and writes,
    and is what real steps ask.
    """

    name: str
    module: nn.Module
    run: Callable[[list[Any]], Any]
    parameters: Mapping[str, TensorSpec]
    buffers: Mapping[str, TensorSpec]
    layout: BatchLayout
    static_leaves: Mapping[int, Any]
    batch_shards: int
    device: torch.device
    effects: StepEffects
    training: bool
    loss_leaf: Callable[[Any], Tensor] | None = None
    edges: tuple[tuple[str, str], ...] = ()
    repeat_blocks: bool = True
    local: bool = False
    seen_by_hooks: bool = False
    state: StepState | None = None
    notice: Callable[[str], None] = field(default=lambda message: None)


class _Step(nn.Module):
    """The module that is exported: flat fake tensors in, flat results out; ``result`` describes the last run."""

    def __init__(self, request: StepRequest) -> None:
        super().__init__()
        self._request = [request]  # in a list: the user's module must not become a submodule of this one
        self.state = request.state or StepState(request.module)
        self._names = [*request.parameters, *request.buffers]
        self.output_spec: Any = None
        self.static_outputs: dict[int, Any] = {}
        self.results = 0
        self.shapes: list[tuple[int, ...]] = []
        self.batch_dims: list[int | None] = []
        self.loss: Tensor | None = None

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        (request,) = self._request
        state = dict(zip(self._names, tensors, strict=False))
        for name in request.parameters:
            mark_parameter(state[name])
        given = list(tensors[len(self._names) :])
        if self.state.needs_vector:
            self.state.watcher.vector = given.pop()
        given = [leaf.clone() if i in self.state.clones else leaf for i, leaf in enumerate(given)]
        given = [given[first] for first in request.layout.same] or given
        leaves = _merge(self._static_leaves(request), tuple(given))
        self.state.writes.local = request.local
        self.state.inputs = {id(tensor) for tensor in state.values()}
        with self._undone(request), request.effects.recording():
            buffers = {name: state[name] for name in request.buffers}
            runner = _Runner(request.module, request.run, buffers, self.state)
            output = torch.func.functional_call(runner, {f"module.{name}": state[name] for name in state}, (leaves,))
            self.state.note_changes(tensors)
            self.state.writes.collect({i: given[i] for i in sorted(self.state.clones)})
            self.state.check_counting()
            return self._flatten(output, request, tensors[: len(self._names)], tuple(given))

    @contextlib.contextmanager
    def _undone(self, request: StepRequest) -> Iterator[None]:
        try:
            with undone_afterwards(request.module):
                yield
        finally:
            self.state.reads.undo_writes()

    def _static_leaves(self, request: StepRequest) -> dict[int, Any]:
        if request.local:
            return dict(request.static_leaves)  # their values tell variants apart
        paths = [leaf.path for leaf in request.layout.leaves]
        leaves = {
            i: stand_in_for_leaf(self.state.watcher, i, paths[i], leaf) for i, leaf in request.static_leaves.items()
        }
        self.state.has_unread = any(type(leaf) is Unread for leaf in leaves.values())
        return {i: self.state.leaf(leaf) for i, leaf in leaves.items()}

    def _flatten(
        self, output: Any, request: StepRequest, state: tuple[Tensor, ...], batch: tuple[Tensor, ...]
    ) -> list[Tensor]:
        leaves, self.output_spec = tree_flatten(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if request.local:
            count = len(request.parameters)
            tensors, statics = own_results(request.name, leaves, state[:count], state[count:], batch)
            self.static_outputs = dict(statics)
        else:
            others = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
            self.static_outputs = {i: self.state.static_result(request.name, leaf) for i, leaf in others.items()}
        if request.training and request.loss_leaf is not None:
            loss = request.loss_leaf(output)
            self.loss = loss.clone() if loss._is_view() else loss  # gradients would come for what it is a view of
            tensors = [self.loss if tensor is loss else tensor.detach() for tensor in tensors]
        self.results = len(tensors)
        tensors += [tensor.detach() for tensor in request.effects.tensors()]
        tensors += self.state.writes.tensors
        self.shapes = [tuple(tensor.shape) for tensor in tensors]
        return tensors

    def shown(self, results: Sequence[Tensor] = ()) -> list[Shown]:
        """What the last run gives that hooks may see, but for rows, which are this rank's."""
        rows = {id(result) for result, dim in zip(results, self.batch_dims, strict=False) if dim is not None}
        returned = [result for result in results[: self.results] if result is not self.loss]
        returned += [leaf for leaf in self.static_outputs.values() if type(leaf) in (int, float)]
        kept = self.state.writes.kept(self.state.watcher.counters)
        found = [Shown(what="returned", value=value, line=self.state.entered) for value in returned]
        found += [Shown(what=f"kept in {text}", value=value, line=line) for line, text, value in kept]
        return [shown for shown in found if id(shown.value) not in rows]

    def name_of(self, position: int) -> str:
        """What the tensor at ``position`` of the flat results is."""
        (request,) = self._request
        if position < self.results:
            return f"result {position} of {request.name}"
        return f"what {request.name} logs or gives to a metric ({position - self.results})"


class _Runner(nn.Module):
    """Runs the step inside ``functional_call`` and turns a reassigned buffer into a change in place."""

    def __init__(
        self,
        module: nn.Module,
        run: Callable[[list[Any]], Any],
        buffers: Mapping[str, Tensor],
        state: StepState,
    ) -> None:
        super().__init__()
        self.module = module
        self._run, self._given, self._state = run, buffers, state

    def forward(self, leaves: list[Any]) -> Any:
        with self._state.running():
            output = tree_map(without_stand_ins, self._run(leaves))
        for name, now in self.module.named_buffers():
            given = self._given.get(name)
            if given is not None and now is not given:
                given.copy_(now)
        return output


def _merge(static: Mapping[int, Any], tensors: tuple[Tensor, ...]) -> list[Any]:
    remaining = iter(tensors)
    total = len(static) + len(tensors)
    return [static[i] if i in static else next(remaining) for i in range(total)]


def capture_step(request: StepRequest) -> CapturedGraph:
    """The joint graph of ``request`` at global shapes.

    Raises:
        CaptureError: the step reads a tensor's value, makes a shape that depends on values, or has no loss; the message
            names the user's line.
    """
    state = request.state or StepState(request.module)
    request = dataclasses.replace(request, state=state)
    with collection_paused(), _remembered_if_captured(state):
        for _ in range(_MOST_STARTS):
            try:
                captured = _capture(request)
                if state.memos.are_found(captured, state.reads):
                    return captured
                state.again()
            except StartOver as reason:
                state.start_over(reason.places if isinstance(reason, NeedsNumbers) else frozenset())
                state.clones |= reason.positions if isinstance(reason, NeedsClones) else frozenset()
                if isinstance(reason, NeedsVector):
                    request = _with_vector(request)
            except AutoParallelError:
                raise
            except Exception:
                if state.reads_leaves or not state.has_unread:
                    raise
                state.start_over(frozenset())  # a function in C cannot read a stand-in
                state.reads_leaves = True
        raise CaptureError(
            f"{request.name} asks for numbers in places that are new whenever it runs: no graph can be given them all"
        )


@contextlib.contextmanager
def _remembered_if_captured(state: StepState) -> Iterator[None]:
    """What tables of libraries remember stays where the step is captured."""
    try:
        yield
    except BaseException:
        state.memos.restore()
        raise


def _with_vector(request: StepRequest) -> StepRequest:
    """The request with one more leaf, for numbers that enter the graph."""
    assert request.state is not None and not request.state.needs_vector, "a part of the step that torch runs again"
    request.state.needs_vector = True
    leaf = BatchLeaf(path=NUMBERS, shape=(MOST_FED,), dtype=torch.float64, batched=False)
    layout = dataclasses.replace(request.layout, leaves=(*request.layout.leaves, leaf))
    return dataclasses.replace(request, layout=layout)


def _capture(request: StepRequest) -> CapturedGraph:
    step = _Step(request)
    export = _export(request, step, request.repeat_blocks)
    if export is None:
        export = _export(request, step, False)
    assert export is not None
    if not request.local:
        check_outputs(request, export, step.state)
    graph_module, constants = normalize_graph(export.graph_module)
    step.state.finish(tuple(constants.values()))
    if request.local:
        check_constants(request.name, constants.values())
    inputs = _inputs(request, export, tuple(constants))
    outputs = _outputs(export, step, inputs, step.batch_dims)
    if request.local:
        check_whole_calls(request.name, outputs, step.state)
    return CapturedGraph(
        name=request.name,
        graph_module=graph_module,
        inputs=inputs,
        outputs=outputs,
        output_spec=step.output_spec,  # type: ignore[arg-type]
        static_outputs=dict(step.static_outputs),
        constants=constants,
        has_backward=any(item.kind == "tangent" for item in inputs),
        local=request.local,
    )


def _export(request: StepRequest, step: _Step, repeat_blocks: bool) -> JointExport | None:
    """The joint graph; None if blocks that looked alike have backwards that are not."""
    groups = repeated_blocks(request.module, request.parameters, request.edges) if repeat_blocks else []
    blocks = RepeatedBlocks(request.module, groups, lambda: request.effects.count() + step.state.count())
    decompositions = planning_decompositions()
    with step.state.watching(), fake_tracing(), _explained(request), contextlib.ExitStack() as stack:
        # Outside of what notices constants: they are none.
        arguments = _fake_arguments(request)
        twice = _fake_arguments(request, 2) if request.batch_shards > 1 else ()
        stack.enter_context(_step_contexts(request, step.state))
        if groups:
            blocks.make_templates(lambda: step(*arguments), decompositions)
        try:
            with blocks.standing_in():
                export = export_joint(step, arguments, decompositions)
        except UnrepeatableBackwardError:
            return None
        step.batch_dims = _batch_dims(request, step, arguments, twice)
        if twice:
            check_as_on_one_rank(request, step, export, arguments, twice)
    blocks.expand(export.graph_module)
    for paths in blocks.traced_once:
        step.state.reads.mirror(paths)
    return export


@contextlib.contextmanager
def _step_contexts(request: StepRequest, state: StepState) -> Iterator[None]:
    unchecked: list[type] = []
    with (
        record_sources(request.module, state.call, is_called=request.local),
        marked_edges(request.module, request.edges),
        backwards_inside(state.backwards.around),
        visible_checkpoint_regions(RegionWrites(request.module, state).around),
        pretend_compiling(),
        mkldnn_off(),
        unchecked_distributions(unchecked),
        whole_lists_of_constants(),
        torch.set_grad_enabled(request.training),
    ):
        yield
    if unchecked:
        request.notice(
            f"{request.name} makes a {unchecked[0].__name__}, whose arguments are not checked at real steps: torch "
            "reads their values for that (validate_args=False says that you want none of it)"
        )


@contextlib.contextmanager
def _explained(request: StepRequest) -> Iterator[None]:
    try:
        yield
    except AutoParallelError:
        raise
    except Exception as error:
        if isinstance(error, MutatedInputError) and not request.local:
            raise changes_input(request, error.position, line_of(request.state, error.position)) from error
        if isinstance(error, OrderedCallError):
            line = fxn.custom(error.node, "source") or "?"
            raise CaptureError(
                f"{line} calls {error.operator}, which raises by a tensor's values or has another effect: torch keeps "
                "such calls in order, and a graph of tensors alone has no place for them"
            ) from error
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, DATA_DEPENDENT_ERRORS):
                raise CaptureError(data_dependent(cause, error)) from error
            cause = cause.__cause__ or cause.__context__
        if request.local:
            raise capture_failed(request.name, error) from error
        raise


def _batch_dims(
    request: StepRequest, step: _Step, arguments: tuple[Tensor, ...], twice: tuple[Tensor, ...]
) -> list[int | None]:
    """The batch's dim in each flat result of the step; nothing to know where the batch is not divided."""
    if request.batch_shards == 1:
        return [None] * len(step.shapes)
    lengths = {leaf.global_shape(request.batch_shards)[0] for leaf in request.layout.tensors if leaf.batched}

    def of_twice_the_rows() -> Shapes:
        try:
            step(*twice)
            return step.shapes
        finally:
            step(*arguments)  # what the step recorded is again that of its own batch

    return batch_dims_of(step.name_of, step.shapes, lengths, of_twice_the_rows, request.training)


def _fake_arguments(request: StepRequest, times: int = 1) -> tuple[Tensor, ...]:
    """The step's tensors; the batch with ``times`` the rows."""
    state = [*request.parameters.values(), *request.buffers.values()]
    tensors = [
        fake_tensor_like(spec.shape, spec.stride, spec.dtype, request.device, spec.requires_grad and request.training)
        for spec in state
    ]
    for leaf in request.layout.tensors:
        assert leaf.dtype is not None
        shape = leaf.global_shape(request.batch_shards * times)
        requires_grad = leaf.requires_grad and request.training
        tensors.append(torch.empty(shape, dtype=leaf.dtype, device=request.device, requires_grad=requires_grad))
    return tuple(tensors)


def _inputs(request: StepRequest, export: JointExport, constants: tuple[str, ...]) -> tuple[GraphInput, ...]:
    known = [
        *(
            GraphInput(kind="parameter", name=name, requires_grad=spec.requires_grad)
            for name, spec in request.parameters.items()
        ),
        *(GraphInput(kind="buffer", name=name) for name in request.buffers),
        *(
            GraphInput(kind="batch", name=leaf.path, batched=leaf.batched, requires_grad=leaf.requires_grad)
            for leaf in request.layout.tensors
        ),
    ]
    inputs = [
        known[position] if kind == "argument" else GraphInput(kind="tangent", name=str(position))
        for kind, position in export.inputs
    ]
    return (*inputs, *(GraphInput(kind="constant", name=name) for name in constants))


def _outputs(
    export: JointExport, step: _Step, inputs: tuple[GraphInput, ...], batch_dims: list[int | None]
) -> tuple[GraphOutput, ...]:
    by_position = {position: inputs[i] for i, (kind, position) in enumerate(export.inputs) if kind == "argument"}
    outputs = []
    for output in export.outputs:
        if output is None:
            continue
        kind, position = output
        if kind == "output":
            is_result = position < step.results
            name = str(position if is_result else position - step.results)
            what: OutputKind = "output" if is_result else "log"
            outputs.append(GraphOutput(kind=what, name=name, batch_dim=batch_dims[position]))
        elif kind == "mutation":
            outputs.append(GraphOutput(kind="buffer", name=_buffer(step, by_position[position])))
        else:
            given = by_position[position]
            outputs.append(GraphOutput(kind="gradient", name=given.name, of=given.kind))
    return tuple(outputs)


def _buffer(step: _Step, changed: GraphInput) -> str:
    (request,) = step._request
    if request.local and changed.kind != "buffer":
        what = "parameter" if changed.kind == "parameter" else "argument"
        raise CaptureError(f"{request.name} changes its {what} '{changed.name}' in place; change a copy of it")
    return changed.name
