"""One run of a captured step: what goes into its graph, and what is made of what comes out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_autoparallel.capture import BatchLayout, Watcher, made_again
from lightning_autoparallel.compile import run_step
from lightning_autoparallel.contracts import PassedOn
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.pipeline.agreed_calls import Agreement
from lightning_autoparallel.pipeline.backward_calls import BackwardCalls
from lightning_autoparallel.pipeline.local_calls import passed_on, runs_again, state_of
from lightning_autoparallel.pipeline.results import take_apart, with_statics
from lightning_autoparallel.pipeline.step_calls import Around, StepCall, StepResult, Variant, static_leaves
from lightning_autoparallel.torch_compat.tree import tree_unflatten

if TYPE_CHECKING:
    from lightning_autoparallel.pipeline.engine import StepEngine


@dataclass(frozen=True, kw_only=True)
class ReadyStep:
    """A captured step and the batch that it will run on; ``counters`` are the numbers that the caller knows."""

    engine: StepEngine
    call: StepCall
    variant: Variant
    layout: BatchLayout
    leaves: Sequence[tuple[str, Any]]
    rebuild: Callable[[list[Any]], Any]
    counters: Mapping[str, int]
    begin: Callable[[], Agreement] | None = None  # where it runs ahead of ranks' agreement

    @property
    def effect_whole(self) -> tuple[bool, ...]:
        """Of every tensor that is logged or written, whether it is equal on all ranks."""
        return self.variant.effect_whole

    def run(self, around: Around = contextlib.nullcontext) -> StepResult:
        """Run it inside ``around()``; every rank calls it alike.

        Raises:
            AutoParallelError: it ran ahead, and ranks differ; nothing has come of it.
        """
        state = self.variant.state
        numbers, found = state.values({**self.counters, **static_leaves(self.leaves)}), state.writes.prepare()
        parameters, buffers = self._state()
        given = self._given(numbers)
        inputs = [*parameters, *buffers.values(), *given]
        with self._agreeing(), self.engine.seeded(self.variant.step, self.call.local), around():
            step, wiring = self.variant.at_this_step(), self.variant.wiring
            results = run_step(step, inputs, wiring, self._again(), self._backwards)
        outputs, effects = take_apart(self.variant.step.captured, results, buffers)
        if not self.call.local:
            self.engine.ahead.ran(self.variant, inputs, len(given))
            self.engine.buffers.write(buffers, self.variant.written_buffers)
        logged = len(effects) - len(state.writes.tensors)
        state.writes.replay([tensor.detach() for tensor in effects[logged:]], numbers, found, self._tensors)
        state.messages.replay(numbers)
        return StepResult(
            output=self._output(outputs, numbers),
            row_dims=self._row_dims(outputs),
            effects=self.variant.effects,
            effect_tensors=tuple(effects[:logged]),
            effect_whole=self.effect_whole[:logged],
            step=self.variant.step,
            numbers=numbers,
        )

    @contextlib.contextmanager
    def _agreeing(self) -> Iterator[None]:
        """Where the step runs ahead, ranks agree meanwhile; where they do not it has drawn nothing."""
        if self.begin is None:
            yield
            return
        answered, drawn = self.begin(), self.engine.draws.count
        try:
            try:
                yield
            except Exception:  # of a signal to end nobody waits for others
                answered()
                raise
            answered()
        except BaseException:
            self.engine.draws.count = drawn
            raise

    @property
    def _backwards(self) -> BackwardCalls | None:
        return self.engine.backwards if self.call.local else None

    @property
    def _tensors(self) -> list[Tensor]:
        return [leaf for _, leaf in self.leaves if isinstance(leaf, Tensor)]

    def _state(self) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
        """The parameters that the step reads, and its buffers by name, as they are now."""
        if self.call.local:
            return state_of(self.engine.module, self.variant.step.captured)
        modes = self.engine.modes
        assert modes is not None, "a step of the whole module is ready once the module's state was looked at"
        return modes.parameters, dict(modes.buffers)

    def _given(self, numbers: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of the batch, and the numbers that the graph takes."""
        given = [tensor.contiguous() for tensor in self._tensors]  # as they were at capture
        if self.variant.state.needs_vector:
            fed = self.variant.state.watcher.numbers(numbers)
            given.append(torch.tensor(fed, dtype=torch.float64).to(self.engine.device, non_blocking=True))
        return given

    def _again(self) -> Callable[[Sequence[Tensor]], list[Tensor | None]] | None:
        """The call as its own code, for gradients of gradients."""
        if not any(leaf.requires_grad for leaf in self.layout.tensors):
            return None
        statics = {i: leaf for i, (_, leaf) in enumerate(self.leaves) if not isinstance(leaf, Tensor)}
        before = self._found_now()

        def run(values: list[Tensor]) -> Any:
            self._check_again(before)
            return self.call.run(self.rebuild(with_statics(values, statics)), Watcher(self.counters))

        return runs_again(self.engine.module, self.variant.step.captured, run, self.engine.device)

    def _found_now(self) -> tuple[Any, ...]:
        """What the call finds besides tensors: modes of its modules, and numbers that are fed."""
        owner = self.engine.module.get_submodule(self.call.path)
        counters = {**self.counters, **static_leaves(self.leaves)}
        return tuple(module.training for module in owner.modules()), self.variant.fed(counters)

    def _check_again(self, before: tuple[Any, ...]) -> None:
        """Whether its own code, run now, does what the call did, and nothing a second time.

        Raises:
            CaptureError: it does not.
        """
        why = ""
        if self.variant.state.writes.has_any or self.variant.effects.count():
            why = "it also writes, logs or updates a metric, which would happen twice"
        elif self._found_now() != before or not self.variant.holds({**self.counters, **static_leaves(self.leaves)}):
            why = "modes of modules or values that it reads are others by now than when it was called"
        if why:
            raise CaptureError(
                f"a gradient of {self.call.name} is differentiated again, for which the module's own code runs once "
                f"more, but {why}: change them behind the backward, or leave the module out of "
                "capture={'forward': [...]}, so that its own code runs the first time, too"
            )

    def _row_dims(self, outputs: Sequence[Tensor]) -> dict[int, int]:
        captured = self.variant.step.captured
        made = {int(item.name): item.batch_dim for item in captured.outputs if item.kind == "output"}
        dims = {id(output): made[position] for output, position in zip(outputs, sorted(made), strict=True)}
        passed = [static.position for static in captured.static_outputs.values() if isinstance(static, PassedOn)]
        dims |= {id(self._tensors[i]): 0 if self.layout.tensors[i].batched else None for i in passed}
        return {tensor: dim for tensor, dim in dims.items() if dim is not None}

    def _output(self, outputs: Sequence[Tensor], numbers: Mapping[str, Any]) -> Any:
        captured = self.variant.step.captured
        statics = passed_on(captured.static_outputs, self._tensors)
        made = {i: made_again(leaf, numbers) for i, leaf in statics.items()}
        return tree_unflatten(with_statics(outputs, made), captured.output_spec)
