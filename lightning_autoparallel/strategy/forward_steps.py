"""Steps whose Python runs at every step on this rank's rows, as under DDP; the modules that they call are captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_autoparallel.capture import Watcher
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.lightning_compat import LightningModule, Trainer
from lightning_autoparallel.pipeline import StepCall, StepEngine, StepResult
from lightning_autoparallel.pipeline.buffers import SharedBuffers
from lightning_autoparallel.pipeline.module_calls import ModuleCalls
from lightning_autoparallel.strategy.metrics import MetricScopes
from lightning_autoparallel.strategy.recorder import LightningEffects

PRECISION_CONTEXTS = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}


class ForwardSteps:
    """Runs one LightningModule's steps as they are written; ``calls`` are the captured calls of its modules."""

    def __init__(
        self,
        module: LightningModule,
        trainer: Trainer,
        engine: StepEngine,
        scopes: MetricScopes,
        names: Sequence[str] | None,
        warn: Callable[[str], None],
    ) -> None:
        self._module, self._trainer, self._engine, self._scopes = module, trainer, engine, scopes
        self.warn = warn
        self._step = "training_step"
        self._counters: Mapping[str, int] = {}
        self.calls = ModuleCalls(engine, self, names)
        self._buffers = SharedBuffers(module, engine.context)

    def run(self, name: str, args: tuple[Any, ...], counters: Mapping[str, int]) -> Any:
        """One real step.

        Raises:
            ConfigError: some ranks skip the batch (None) and others do not.
        """
        self._step, self._counters = name, counters
        self._scopes.join_rows(self._module)
        self._buffers.share()
        plugin = self._trainer.precision_plugin
        with self.calls.running(), getattr(plugin, PRECISION_CONTEXTS[name])():
            output = getattr(self._module, name)(*args)
        if name == "training_step" and self._module.automatic_optimization:
            self._check_all_skip(output is None)
        return output

    def _check_all_skip(self, skips: bool) -> None:
        control = self._engine.context.control
        if control.agrees(str(skips)):
            return
        ranks = [rank for rank, theirs in enumerate(control.gather(skips)) if theirs]
        raise ConfigError(
            f"training_step returned None on ranks {ranks} only: the others would wait for their gradients for ever; "
            "skip a batch on all ranks or on none, or return a loss of zero (loss * 0)"
        )

    def module_call(self, path: str, module: nn.Module) -> StepCall:
        """The call of one submodule, captured on this rank's rows."""
        return StepCall(
            name=f"{self._step}:{path}",
            run=lambda batch, watcher: module(*batch[0], **batch[1]),
            effects=self._effects,
            training=True,
            local=True,
            path=path,
        )

    def _effects(self, watcher: Watcher) -> LightningEffects:
        return LightningEffects(self._module, watcher, self.warn, self._scopes, whole_batch=False)

    def counters(self) -> Mapping[str, int]:
        """Of the step that runs."""
        return self._counters

    def replay(self, result: StepResult) -> None:
        """What modules log, and which metrics they update."""
        effects = result.effects
        assert isinstance(effects, LightningEffects)
        effects.replay(result.effect_tensors, result.effect_whole, self._counters)
