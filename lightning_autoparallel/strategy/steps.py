"""A LightningModule's steps as calls of the engine: whole where they can be captured, else module by module."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_autoparallel.capture import Watcher
from lightning_autoparallel.config import CaptureSpec
from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.errors import CaptureError, RanksDifferError, StepFailedError, TooManyCapturesError
from lightning_autoparallel.lightning_compat import LightningModule, Trainer, is_param_in_hook_signature, rank_zero_warn
from lightning_autoparallel.lightning_compat.hooks import around_hooks
from lightning_autoparallel.pipeline import StepCall, StepEngine
from lightning_autoparallel.pipeline.module_calls import NOT_CAPTURED
from lightning_autoparallel.pipeline.owed_gradients import mean_over_shards
from lightning_autoparallel.pipeline.plan_of_calls import begin_step
from lightning_autoparallel.pipeline.sharded_updates import needs_no_help
from lightning_autoparallel.strategy.counted_once import counting_once
from lightning_autoparallel.strategy.early_gradients import free_gradients, told_of_kept
from lightning_autoparallel.strategy.forward_steps import PRECISION_CONTEXTS, ForwardSteps
from lightning_autoparallel.strategy.last_rows import RowsOfBatch, idle_ranks_unseen, rows_of_this, without_spare
from lightning_autoparallel.strategy.launch import place_of
from lightning_autoparallel.strategy.launch_counts import LaunchCounter
from lightning_autoparallel.strategy.logged import LoggedAs, as_if_plainly_logged, forget_earlier_runs
from lightning_autoparallel.strategy.metrics import MetricScopes
from lightning_autoparallel.strategy.ranks_of_batch import RanksOfBatch
from lightning_autoparallel.strategy.recorder import LightningEffects
from lightning_autoparallel.strategy.sampling import rows_of_batches
from lightning_autoparallel.strategy.seen_by_hooks import has_hooks
from lightning_autoparallel.strategy.synced_numbers import LoggedNumbers
from lightning_autoparallel.strategy.told_losses import number_of, told_as

_BATCH_INDEX = "batch_idx"
_PATIENCE = 64  # training steps; closures of optimizers run several for one of theirs
_LINE = re.compile(r"\.py:\d+|^rank \d+ stopped")  # whose line is not ours


class LightningSteps:
    """Runs ``training_step`` and its siblings of one module through one engine.

    ``modes`` says of every step that ran, or was prepared, whether it was captured whole (``"step"``) or runs its own
    Python (``"forward"``).
    """

    def __init__(self, module: LightningModule, trainer: Trainer, engine: StepEngine, capture: CaptureSpec) -> None:
        self._module, self._trainer, self._engine, self._capture = module, trainer, engine, capture
        self._noticed: set[str] = set()
        self._scopes = MetricScopes(engine.context.mesh)
        self._logged_as: LoggedAs = {}
        (self._has_hooks,) = engine.context.control.any([has_hooks(module, trainer)])  # on any rank, at first
        self._rows_of_all: set[int] = set()  # of batches that were run whole
        self._replayed: dict[str, dict[int, LightningEffects]] = {}  # of each step, by identity
        self.launches = LaunchCounter(engine.context.mesh)
        self.modes: dict[str, str] = {}
        self._accumulates = False
        self._rows = RowsOfBatch()  # of the step that ran last
        self._ranks = RanksOfBatch(engine.context, trainer, self._notice)
        self._forward: ForwardSteps | None = None
        forget_earlier_runs(trainer)

    def end(self) -> None:
        """Nothing runs any more; the module's metrics are as they were."""
        self._scopes.end()

    @contextlib.contextmanager
    def around_hooks(self) -> Iterator[None]:
        """From the Trainer's setup to its teardown: hooks see the rows that the rank has, and count each once."""
        with idle_ranks_unseen(self._trainer), around_hooks(self._counting):
            yield

    @contextlib.contextmanager
    def _counting(self, hook: str) -> Iterator[None]:
        counts = hook in ("on_validation_batch_end", "on_test_batch_end")
        counting = counting_once(self._module, self._rows, self._scopes) if counts else contextlib.nullcontext()
        with self._ranks.told_in(hook), counting:
            yield

    def forget_captures(self) -> None:
        """The module is made of other parameters: what was captured whole is captured anew."""
        self.modes = {name: mode for name, mode in self.modes.items() if mode == "forward"}
        self._forward = None

    @property
    def forward(self) -> ForwardSteps:
        """Steps whose Python runs at every step; made at first use."""
        if self._forward is None:
            self._forward = ForwardSteps(
                self._module,
                self._trainer,
                self._engine,
                self._scopes,
                self._capture.modules,
                self._ranks,
                self._notice,
            )
        return self._forward

    def mode(self, name: str) -> str:
        """How a step runs as far as is known: ``"step"`` until something speaks against it."""
        if self._capture.mode == "forward":
            return self.modes.setdefault(name, "forward")
        if name == "training_step" and not self._module.automatic_optimization and name not in self.modes:
            reason = f"{type(self._module).__name__} optimizes by itself (automatic_optimization=False)"
            self._climb_down(name, CaptureError(reason))
        return self.modes.get(name, "step")

    def prepare(self, name: str, batch: Any) -> PlanReport:
        """Capture a whole step for batches like this one, without running it.

        Raises:
            AutoParallelError: it cannot be captured whole.
        """
        mode = self.mode(name)
        assert mode == "step", "who plans asks for whole steps"
        args = (batch, 0) if self._takes_index(name) else (batch,)
        self._engine.deferred.active = name == "training_step" and self._defers()
        try:
            return self._engine.prepare(self._call(name, args), batch, self._counters(args))
        except StepFailedError:
            raise
        except (*NOT_CAPTURED, RanksDifferError) as error:
            self._climb_down(name, error)
            raise

    def run(self, name: str, args: tuple[Any, ...]) -> Any:
        """One real step on what Lightning gives it: the batch, then the indices of batch and dataloader it asks for."""
        if name == "training_step":
            self.launches.start()
            self._engine.deferred.active = self._defers()
        around = self.launches.counting if name == "training_step" else contextlib.nullcontext
        self._rows = rows = RowsOfBatch() if name == "training_step" else rows_of_this(self._trainer, args)
        if rows.common:
            args = (self._engine.context.control.same_batch(args[0]), *args[1:])
        if self.mode(name) == "step":
            try:
                return self._run_captured(name, args, around, rows)
            except TooManyCapturesError as error:
                if self._capture.mode == "step":
                    return self._run_captured_anew(name, args, around, rows, error)
                self._climb_down(name, error)
            except (*NOT_CAPTURED, RanksDifferError) as error:
                self._climb_down(name, error)
        if name == "training_step":
            self.launches.start()  # without those of a forward that came to nothing
            unfound = begin_step(self._engine, self._trainer.global_step, self._patience)
            if unfound is not None:
                self._notice(unfound)
        self._engine.context.control.has_trained = False  # the next batch is met before, as buffers are sent then
        with around():
            output = self.forward.run(name, args, self._counters(args), rows)
            return without_spare(output, args[0], rows)

    @property
    def _patience(self) -> int:
        """Training steps in which an optimizer is expected to step."""
        return _PATIENCE + self._trainer.accumulate_grad_batches

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around the backward of the training step: its collectives are counted with those of the forward."""
        self._engine.deferred.prepare()
        with contextlib.ExitStack() as own:
            own.enter_context(self.launches.counting())
            if self.mode("training_step") == "forward":
                own.enter_context(self._ranks.seen("training_step"))
                own.enter_context(self.forward.calls.running())
            yield
        if self._forward is not None and self._module.automatic_optimization:
            self._forward.calls.parameters.backwards.clear()

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Around a micro-batch whose gradients no optimizer asks for yet."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def _defers(self) -> bool:
        """Whether the gradients of a training step wait: alike for all micro-batches of a window."""
        if not self._engine.deferred.may_wait:
            return False
        is_window = self._module.automatic_optimization and self._trainer.accumulate_grad_batches > 1
        return self._accumulates or is_window or self._engine.deferred.owed

    def reduce_gradients(self, within_window: bool = False) -> None:
        """Reduce what waits, unless more is to come; the collectives are those of the step that ran last.

        ``within_window`` reduces it where more is to come, which will be added, and only there.
        """
        if self._accumulates != within_window:
            return
        is_forward = self.mode("training_step") == "forward"
        paused = self._forward.calls.parameters.paused() if self._forward else contextlib.nullcontext()
        with self.launches.counting(), paused, torch.no_grad():
            launched = self._engine.deferred.reduce(agree=is_forward and self._engine.deferred.active)
        if not is_forward:
            before = self.launches.predicted
            self.launches.predicted = {axes: before.get(axes, 0) + launched.get(axes, 0) for axes in before | launched}

    def optimizing(self) -> contextlib.AbstractContextManager[None]:
        """Around a step of an optimizer."""
        return contextlib.nullcontext() if self._forward is None else self._forward.calls.parameters.changing()

    def closing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """An optimizer's closure, which runs code of the step."""

        def run() -> Any:
            resumed = self._forward.calls.parameters.resumed() if self._forward else contextlib.nullcontext()
            with resumed:
                return closure()

        return run

    def told_loss(self, optimizer: Optimizer, loss: Any) -> Any:
        """What an optimizer is told of its closure; one that may decide by it decides alike on all ranks.

        It is the mean of the losses of those ranks whose closure gave one.
        """
        if self.mode("training_step") != "forward" or needs_no_help(optimizer):
            return loss
        number = number_of(loss)
        own = torch.tensor([0.0, 0.0] if number is None else [number, 1.0], dtype=torch.float64)
        told = mean_over_shards(own.to(self._engine.device), self._engine.context.mesh)
        return loss if number is None else told_as(loss, float(told[0] / told[1]))

    def _run_captured(self, name: str, args: tuple[Any, ...], around: Any, rows: RowsOfBatch) -> Any:
        counters = self._counters(args)
        if self._forward is not None:
            self._forward.give_way()
        call = dataclasses.replace(self._call(name, args), common=rows.common)
        ready = self._engine.ready(call, args[0], counters)  # nothing has run where this raises
        if name == "training_step":
            stay = free_gradients(self._trainer) and ready.variant.step.partitioned.earlier_gradients == "freed"
            told = told_of_kept(self._module) if stay else None
            if told is not None:
                self._notice(told)
        effects = ready.variant.effects
        assert isinstance(effects, LightningEffects)
        effects.check(ready.effect_whole, rows)
        result = ready.run(around)
        batched = [leaf.shape for leaf in ready.layout.tensors if leaf.batched and leaf.shape]
        self._rows_of_all |= {shape[0] * self._scopes.shards for shape in batched}
        if name == "training_step":
            # Of the variant that ran: the engine's reports are of the last one that was captured.
            self.launches.predicted = result.step.report.launches()
        self.modes[name] = "step"
        self._replayed.setdefault(name, {})[id(effects)] = effects
        if effects.logged_as is not self._logged_as:  # captured in an earlier run
            self._logged_as.update(effects.logged_as)
        effects.replay(result.effect_tensors, result.effect_whole, result.numbers, rows)
        return without_spare(result.output, args[0], rows, lambda tensor: result.row_dims.get(id(tensor)))

    def _run_captured_anew(
        self, name: str, args: tuple[Any, ...], around: Any, rows: RowsOfBatch, error: TooManyCapturesError
    ) -> Any:
        """Where nothing but whole steps was asked for, a training does not end because there are many kinds of them."""
        self._notice(
            f"autoparallel: {_located(error, getattr(self._module, name))}. What was captured of {name} so far is let "
            'go, and captured again where it is needed, which takes time; capture="auto" runs such a step\'s own Python'
        )
        self._engine.forget(name)
        self._replayed.pop(name, None)
        return self._run_captured(name, args, around, rows)

    def _climb_down(self, name: str, error: Exception) -> None:
        """From here on the step's Python runs at every step; on all ranks, which have all met an error.

        Raises:
            Exception: the error itself, where the whole step was asked for.
        """
        reason = _located(error, getattr(self._module, name))
        if self._capture.mode == "step":
            if isinstance(error, StepFailedError):
                raise CaptureError(f"{reason}: that is what {name} raised when it was captured") from error.__cause__
            if not isinstance(error, RanksDifferError):  # which is of the batch, not of the step
                error.args = (reason,)
            raise error
        self.modes[name] = "forward"
        as_if_plainly_logged(self._trainer, self._logged_as, self._scopes.shards, self._rows_of_all)
        for effects in self._replayed.pop(name, {}).values():
            self._scopes.leave_whole(effects.metrics())
        self._notice(
            f"autoparallel: {name} runs in forward mode: {reason}. Its Python runs at every step on each rank's rows, "
            "as under DDP: the loss is that of these rows, and what is captured is what its modules compute"
        )

    def _takes_index(self, name: str) -> bool:
        return bool(is_param_in_hook_signature(getattr(self._module, name), _BATCH_INDEX, min_args=2))

    def _counters(self, args: tuple[Any, ...]) -> dict[str, int]:
        return {
            _BATCH_INDEX: args[1] if len(args) > 1 else 0,
            "global_step": self._trainer.global_step,
            "current_epoch": self._trainer.current_epoch,
        }

    def _call(self, name: str, args: tuple[Any, ...]) -> StepCall:
        """The step with its batch index watched; another dataloader's index makes another step."""
        takes_index = len(args) > 1 and self._takes_index(name)
        rest = args[2:] if takes_index else args[1:]
        dataloader_index = rest[0] if rest else None

        def run(batch: Any, watcher: Watcher) -> Any:
            index = (watcher.value(_BATCH_INDEX),) if takes_index else ()
            # At capture only: what the context casts, and the dtype of what the step makes, are in the graph.
            with getattr(self._trainer.precision_plugin, PRECISION_CONTEXTS[name])():
                return getattr(self._module, name)(batch, *index, *rest)

        return StepCall(
            name=name if not dataloader_index else f"{name}.{dataloader_index}",
            run=run,
            effects=lambda watcher: LightningEffects(
                self._module,
                watcher,
                self._notice,
                self._scopes,
                logged_as=self._logged_as,
                numbers=LoggedNumbers(self._engine.context.mesh, self._engine.context.control),
            ),
            training=name == "training_step",
            loss_leaf=_loss_of if name == "training_step" else None,
            rows=rows_of_batches(self._trainer, name, dataloader_index or 0),
            seen_by_hooks=name == "predict_step" or self._has_hooks or has_hooks(self._module, self._trainer),
            code=_code_of(inspect.getattr_static(self._module, name, None)),
        )

    def _notice(self, message: str) -> None:
        if message not in self._noticed:
            self._noticed.add(message)
            rank_zero_warn(message)


def _code_of(step: Any) -> tuple[Any, ...]:
    """Of what an attribute or a class holds, what stays the same where methods and partial calls are made anew."""
    if isinstance(step, (functools.partial, functools.partialmethod)):
        return (*_code_of(step.func), *step.args, *step.keywords.values())
    return getattr(step, "__func__", step), getattr(step, "__self__", None)


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise CaptureError(
            f"training_step returned {type(output).__name__}, not a loss: return a tensor, or a dict with 'loss'"
        )
    if loss.numel() != 1:
        raise CaptureError(
            f"training_step returned a loss of shape {tuple(loss.shape)}: reduce it to one number, e.g. .mean()"
        )
    return loss


def _located(error: Exception, step: Callable[..., Any]) -> str:
    """The error's message with a line of the user's code, that of the step if it names none."""
    return str(error) if _LINE.search(str(error)) else f"{place_of(step)}: {error}"
