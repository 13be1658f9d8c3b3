"""A LightningModule's steps as calls of the engine, their launches counted, their effects replayed."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_autoparallel.capture import Watcher
from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.pipeline import StepCall, StepEngine
from lightning_autoparallel.strategy.metrics import MetricScopes
from lightning_autoparallel.strategy.recorder import LightningEffects
from lightning_autoparallel.torch_compat.collectives import launched_collectives

_BATCH_INDEX = "batch_idx"
_PRECISION_CONTEXTS = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}


class LightningSteps:
    """Runs ``training_step`` and its siblings of one module through one engine."""

    def __init__(self, module: LightningModule, trainer: Trainer, engine: StepEngine) -> None:
        self._module, self._trainer, self._engine = module, trainer, engine
        self._noticed: set[str] = set()
        self._scopes = MetricScopes(engine.context.mesh)
        self.measured_launches: dict[str, int] = {}
        self.predicted_launches: dict[str, int] = {}

    def prepare(self, name: str, batch: Any) -> PlanReport:
        """Capture a step for batches like this one, without running it."""
        args, kwargs = self._arguments(name, batch)
        return self._engine.prepare(self._call(name, kwargs), batch, self._counters(args, kwargs))

    def run(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One real step: compute, then replay what the step logged."""
        counters = self._counters(args, kwargs)
        call = self._call(name, dict(kwargs), *args[1:])
        if name == "training_step":
            self.measured_launches = {}
        batch = args[0] if args else kwargs["batch"]
        around = self.counting if name == "training_step" else contextlib.nullcontext
        result = self._engine.execute(call, batch, counters, around)
        if name == "training_step":
            # Of the variant that ran: the engine's reports are of the last one that was captured.
            self.predicted_launches = result.step.report.launches()
        effects = result.effects
        assert isinstance(effects, LightningEffects)
        effects.replay(result.effect_tensors, result.effect_whole, result.numbers)
        return result.output

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Add the collectives launched inside to ``measured_launches``."""
        # Asked anew each time: a step that was captured in between may have made groups of its own.
        groups = self._engine.context.mesh.axes_by_group()
        before = {group: launched_collectives(group) for group in groups}
        yield
        for group, axes in groups.items():
            launched = launched_collectives(group) - before[group]
            if launched:
                self.measured_launches[axes] = self.measured_launches.get(axes, 0) + launched

    def _arguments(self, name: str, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (batch, 0) if self._takes_index(name) else (batch,), {}

    def _takes_index(self, name: str) -> bool:
        return _BATCH_INDEX in inspect.signature(getattr(self._module, name)).parameters

    def _counters(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, int]:
        index = kwargs.get(_BATCH_INDEX, args[1] if len(args) > 1 else 0)
        return {
            _BATCH_INDEX: index,
            "global_step": self._trainer.global_step,
            "current_epoch": self._trainer.current_epoch,
        }

    def _call(self, name: str, kwargs: dict[str, Any], *rest: Any) -> StepCall:
        """The step with its batch index watched; another dataloader's index makes another step."""
        dataloader_index = rest[1] if len(rest) > 1 else kwargs.get("dataloader_idx")
        takes_index = self._takes_index(name)

        def run(batch: Any, watcher: Watcher) -> Any:
            arguments: list[Any] = [batch]
            if takes_index:
                arguments.append(watcher.value(_BATCH_INDEX))
            if dataloader_index is not None:
                arguments.append(dataloader_index)
            # At capture only: what the context casts, and the dtype of what the step makes, are in the graph.
            with getattr(self._trainer.precision_plugin, _PRECISION_CONTEXTS[name])():
                return getattr(self._module, name)(*arguments)

        return StepCall(
            name=name if not dataloader_index else f"{name}.{dataloader_index}",
            run=run,
            effects=lambda watcher: LightningEffects(self._module, watcher, self._notice, self._scopes),
            training=name == "training_step",
            loss_leaf=_loss_of if name == "training_step" else None,
        )

    def _notice(self, message: str) -> None:
        if message not in self._noticed:
            self._noticed.add(message)
            rank_zero_warn(message)


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise CaptureError(
            f"training_step returned {type(output).__name__}, not a loss: return a tensor, or a dict with 'loss'"
        )
    if loss.dim() != 0:
        raise CaptureError(
            f"training_step returned a loss of shape {tuple(loss.shape)}: reduce it to one number, e.g. .mean()"
        )
    return loss
