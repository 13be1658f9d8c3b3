"""Steps whose Python runs at every step on this rank's rows, as under DDP; the modules that they call are captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_autoparallel.capture import Watcher
from lightning_autoparallel.errors import OtherRankError
from lightning_autoparallel.lightning_compat import LightningModule, Trainer
from lightning_autoparallel.pipeline import StepCall, StepEngine, StepResult
from lightning_autoparallel.pipeline.buffers import SharedBuffers
from lightning_autoparallel.pipeline.module_calls import ModuleCalls
from lightning_autoparallel.pipeline.own_writes import differing_writes
from lightning_autoparallel.strategy import gathered_ranks, world
from lightning_autoparallel.strategy.counted_once import counting_once
from lightning_autoparallel.strategy.last_rows import RowsOfBatch
from lightning_autoparallel.strategy.lightning_tools import syncs_norms
from lightning_autoparallel.strategy.metrics import MetricScopes
from lightning_autoparallel.strategy.ranks_of_batch import RanksOfBatch
from lightning_autoparallel.strategy.recorder import LightningEffects
from lightning_autoparallel.strategy.shared_losses import SharedLosses
from lightning_autoparallel.torch_compat.group_calls import collectives_told

PRECISION_CONTEXTS = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}
_ENGINE = __name__.partition(".")[0]
_TALKING = (world.__name__, gathered_ranks.__name__)  # for the step


class ForwardSteps:
    """Runs one LightningModule's steps as they are written; ``calls`` are the captured calls of its modules."""

    def __init__(
        self,
        module: LightningModule,
        trainer: Trainer,
        engine: StepEngine,
        scopes: MetricScopes,
        names: Sequence[str] | None,
        ranks: RanksOfBatch,
        warn: Callable[[str], None],
    ) -> None:
        self._module, self._trainer, self._engine, self._scopes = module, trainer, engine, scopes
        self.warn, self._ranks = warn, ranks
        self._step = "training_step"
        self._counters: Mapping[str, int] = {}
        self._rows = RowsOfBatch()
        self.calls = ModuleCalls(engine, self, names, syncs_norms(trainer))
        self._buffers, self._has_run = SharedBuffers(module, engine.context), False
        self._losses = SharedLosses(engine.context.control, warn)

    def run(self, name: str, args: tuple[Any, ...], counters: Mapping[str, int], rows: RowsOfBatch) -> Any:
        """One real step.

        Raises:
            AutoParallelError: another rank raised, called other modules, or alone skips the batch (None).
        """
        has_trained = not self._has_run or self._step == "training_step"
        self._step, self._counters, self._rows, self._has_run = name, counters, rows, True
        self.calls.parameters.start()
        if has_trained or name == "training_step":  # from one evaluating step to the next each rank counts its own
            self._buffers.share()
        plugin = self._trainer.precision_plugin
        output, error = None, None
        try:
            self._engine.check_parameters()
            counting = counting_once(self._module, rows, self._scopes)
            joins = collectives_told(self._meet, self.calls.parameters.note_changed)
            precision = getattr(plugin, PRECISION_CONTEXTS[name])()
            with self._ranks.seen(name), self.calls.running(), precision, counting, joins:
                output = getattr(self._module, name)(*args)
        except OtherRankError:
            raise
        except Exception as caught:  # raised again below, once every rank knows
            error = caught
        self._end(name, output, error)
        if name == "training_step":
            self._losses.check(name, output)
        return output

    def _meet(self, collective: str, group: dist.ProcessGroup, asking: str) -> None:
        """Other ranks may still compute with parameters, which all gather, when this one's step talks to them.

        The engine's own collectives are started by all ranks at once, and groups of the user's need not have them all.
        """
        context = self._engine.context
        is_engines = asking.partition(".")[0] == _ENGINE and asking not in _TALKING
        names = context.mesh.axes_by_group()
        if is_engines or context.control.alone or group is context.control.group:
            return
        if group.size() == dist.get_world_size() or group.group_name in {*names, *self._ranks.group_names}:
            self.calls.meet(collective)

    def give_way(self) -> None:
        """To a step of all ranks together: it starts from rank 0's buffers, once after steps that ran here."""
        if self._has_run:
            self._has_run = False
            self._buffers.make_equal()
            self._engine.buffers.are(self._module.named_buffers())

    def _end(self, name: str, output: Any, error: Exception | None) -> None:
        """Ranks end a step together: the backward of those that go on would wait for the others for ever."""
        skips = name == "training_step" and self._module.automatic_optimization and output is None
        place = f"the end of {name}{', skipping the batch' if skips else ''}"
        control, writes = self._engine.context.control, self._engine.context.own_writes
        while True:
            try:
                control.raise_together(error, f"{place}{writes.text(parts=True)}")
                return writes.clear()
            except OtherRankError as elsewhere:
                differing = None if elsewhere is error else differing_writes(elsewhere.places)
                if differing is not None:
                    writes.tell(differing, name, self.warn, control.gather)
                    return writes.clear()
                if elsewhere is error or not self.calls.parameters.take_part(elsewhere.places):
                    raise

    def module_call(self, path: str, module: nn.Module) -> StepCall:
        """The call of one submodule, captured on this rank's rows."""

        def run(batch: Any, watcher: Watcher) -> Any:
            with self.calls.eager():  # also where the engine runs it again, for gradients of gradients
                return module(*batch[0], **batch[1])

        return StepCall(
            name=f"{self._step}:{path}",
            run=run,
            effects=self._effects,
            training=True,  # where autograd records
            evaluating=self._step != "training_step",
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
        effects.replay(result.effect_tensors, result.effect_whole, self._counters, self._rows)
