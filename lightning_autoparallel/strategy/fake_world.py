"""``PlanningStrategy``: what rank 0 of a world does up to its first step, by which it plans it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lightning_autoparallel.config import AUTO, MeshSpec
from lightning_autoparallel.contracts import CapturedGraph, EarlierGradients, PlanReport
from lightning_autoparallel.cost import hardware_from
from lightning_autoparallel.cost.detect import detected_hardware
from lightning_autoparallel.errors import AutoParallelError, ConfigError
from lightning_autoparallel.lightning_compat import Callback, LightningModule, Trainer
from lightning_autoparallel.pipeline import StepEngine
from lightning_autoparallel.pipeline.optimizer_memory import OptimizerProbe
from lightning_autoparallel.pipeline.predict import global_rows
from lightning_autoparallel.pipeline.progress import StageProgress
from lightning_autoparallel.pipeline.summary import with_inference, with_optimizer_bytes
from lightning_autoparallel.strategy.early_gradients import earlier_gradients
from lightning_autoparallel.strategy.mesh_search import meshes, other_splits
from lightning_autoparallel.strategy.one_rank import OneRankStrategy
from lightning_autoparallel.strategy.planned_device import CPU, PlannedDevice, lying_on
from lightning_autoparallel.strategy.sampling import sample_training_batch, sample_validation_batch
from lightning_autoparallel.strategy.steps import LightningSteps


class PlanningStrategy(OneRankStrategy):
    """Plans the training step as rank 0 of a fake world, then ends the fit before its first batch.

    No parameter is allocated: the model is built on the meta device and never sharded.

    Args:
        world_size: ranks of the fake world.
        ranks_per_node: ranks of one node; None stands for those that the rates of ``hardware`` were measured with.
        inference: plan the validation step too.
        mesh: axis sizes, or ``"auto"``: meshes that the ranks can form are tried.
        global_batch_size: rows of one optimizer step, which meshes that are tried must get to by whole micro-batches.
        device: what the step is captured for, ``"cpu"`` or ``"cuda"``.
        options: arguments of AutoParallelStrategy; nothing is compiled, whatever they say.

    Raises:
        ConfigError: an argument is wrong, or the mesh does not fit ``world_size``.
    """

    strategy_name = "autoparallel_planning"

    def __init__(
        self,
        *,
        world_size: int,
        ranks_per_node: int | None = None,
        inference: bool = False,
        mesh: dict[str, int] | str | None = None,
        global_batch_size: int | None = None,
        device: str = CPU,
        **options: Any,
    ) -> None:
        # A plan is that of a whole step: what its Python does around modules is not known without running it.
        searches = mesh == AUTO
        super().__init__(
            world_size=world_size,
            ranks_per_node=ranks_per_node,
            mesh=None if searches else mesh,
            **{**options, "compile": False, "capture": "step"},
        )
        self.planned_for = PlannedDevice(device)
        if self.planned_for.is_missing and self.config.hardware is None:
            self.predict_for(detected_hardware(device).name)  # asked now: later there seems to be a GPU
        self._searches = searches
        self.global_batch_size = _checked_rows(global_batch_size, searches)
        self.progress = StageProgress()  # whoever makes the Trainer knows whether to show any
        self.left_out: Sequence[Callback] = ()  # of the training's callbacks
        self._inference = inference
        self._probe: OptimizerProbe | None = None
        self._probe_error: str | None = None
        self.report: PlanReport | None = None

    @property
    def candidates(self) -> tuple[MeshSpec, ...]:
        """Meshes to try; none where one was given."""
        return meshes(self.config.plan, self._world_size, self.ranks_per_node) if self._searches else ()

    def others_like(self, best: MeshSpec) -> tuple[MeshSpec, ...]:
        """More meshes to try, once the best of the candidates is known."""
        return other_splits(self.config.plan, self.ranks_per_node, best)

    def plan_for(self, spec: MeshSpec) -> None:
        """The next fit plans on this mesh."""
        self.spec, self.report = spec, None
        self._engine = self._steps = self._mesh = None  # those of another mesh

    @contextlib.contextmanager
    def dumping_nothing(self) -> Iterator[None]:
        """Inside, what is planned leaves no files: several meshes would leave theirs in one folder."""
        config = self.config
        self.config = dataclasses.replace(config, dump_dir=None)
        try:
            yield
        finally:
            self.config = config

    def explain(self, pattern: str) -> None:
        """Have the report say why parameters and calls that the glob matches are placed as they are."""
        self.config = dataclasses.replace(self.config, explain=pattern)

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Always on meta."""
        with self.as_it_trains(), on_meta("configure_model"), super().tensor_init_context(empty_init=True):
            yield

    def as_it_trains(self) -> contextlib.AbstractContextManager[None]:
        """Inside, Python that asks for CUDA hears what it will where it trains."""
        return self.planned_for.seeming(None if self.config.hardware is None else hardware_from(self.config.hardware))

    def _lying(self) -> contextlib.AbstractContextManager[None]:
        assert self.lightning_module is not None
        return lying_on(self.planned_for.device, self.lightning_module)

    def _earlier_gradients(self, module: LightningModule, captured: CapturedGraph) -> EarlierGradients:
        at_once = global_rows(captured)
        if self.global_batch_size is not None and at_once is not None and at_once < self.global_batch_size:
            return "kept"  # it takes several micro-batches to get there
        return earlier_gradients(module, self.optimizers, captured.name, self.left_out)

    def _micro_batches(self, module: LightningModule, captured: CapturedGraph) -> int:
        at_once = global_rows(captured)
        if self.global_batch_size is not None and at_once:
            return max(1, self.global_batch_size // at_once)
        return super()._micro_batches(module, captured)

    def _progress_of(self, module: LightningModule) -> StageProgress:
        return self.progress

    def _place_parameters(self, engine: StepEngine) -> None:
        """Leave the parameters as they are: their shapes are all that is needed."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Optimizers over stand-ins for the parameters, to be asked later what they keep."""
        assert self.lightning_module is not None
        self._probe = OptimizerProbe(self.lightning_module)
        try:
            with self._probe.standing_in():
                super().setup_optimizers(trainer)
        except Exception as error:
            self._probe_error = f"configure_optimizers failed without real parameters ({type(error).__name__}: {error})"

    def setup(self, trainer: Trainer) -> None:
        """Plan at once: nothing is to run, no hook and no evaluation."""
        super().setup(trainer)
        assert self._steps is not None and self._engine is not None and self._probe is not None
        self._engine.traced_on = self.planned_for.device
        self._engine.stand_ins = lambda: {} if self._probe is None else self._probe.names
        self._plan_steps(trainer, self._steps)

    def _plan_steps(self, trainer: Trainer, steps: LightningSteps) -> None:
        batch = _required("training", sample_training_batch(trainer))
        with self.as_it_trains(), self._lying():
            report = steps.prepare("training_step", batch)
        if self._inference:
            report = with_inference(report, self._prepare_validation_step(trainer, steps))
        self.report = self._with_optimizers(_without_compiling(report))
        # the fit ends before its first batch
        trainer.should_stop = True

    def _prepare_validation_step(self, trainer: Trainer, steps: LightningSteps) -> PlanReport:
        assert self.lightning_module is not None
        batch = _required("validation", sample_validation_batch(trainer))
        modes = [(submodule, submodule.training) for submodule in self.lightning_module.modules()]
        self.lightning_module.eval()
        try:
            with self.as_it_trains(), self._lying():
                return steps.prepare("validation_step", batch)
        finally:
            for submodule, training in modes:
                submodule.training = training

    def _with_optimizers(self, report: PlanReport) -> PlanReport:
        assert self._probe is not None
        try:
            if self._probe_error is not None:
                raise ConfigError(f"the bytes of optimizer state are not known: {self._probe_error}")
            return with_optimizer_bytes(report, self._probe.state_bytes(self.optimizers, report.parameters))
        except ConfigError as error:
            return dataclasses.replace(report, notes=(*report.notes, str(error).partition("\n")[0]))


@contextlib.contextmanager
def on_meta(what: str) -> Iterator[None]:
    """Tensors made inside have shapes only.

    Raises:
        ConfigError: what ran inside needs values.
    """
    try:
        with torch.device("meta"):
            yield
    except AutoParallelError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{what} cannot run on the meta device, where planning builds the model without its memory "
            f"({type(error).__name__}: {error}): do not read values of tensors there, and load weights elsewhere"
        ) from error


def _without_compiling(report: PlanReport) -> PlanReport:
    """Nothing is compiled, so the time for it says nothing."""
    seconds = {stage: spent for stage, spent in report.timings_s.items() if stage != "compile"}
    return dataclasses.replace(report, timings_s=seconds)


def _checked_rows(global_batch_size: int | None, searches: bool) -> int | None:
    if global_batch_size is not None and not searches:
        raise ConfigError(
            f"global_batch_size={global_batch_size} chooses among meshes, but one is given: set mesh to 'auto', or "
            "leave it out and set accumulate_grad_batches"
        )
    if global_batch_size is not None and global_batch_size < 1:
        raise ConfigError(f"global_batch_size={global_batch_size} must be at least 1")
    return global_batch_size


def _required(kind: str, sample: tuple[bool, Any]) -> Any:
    found, batch = sample
    if not found:
        raise ConfigError(
            f"planning needs a first {kind} batch, but the data gives none that can be looked at: check its length "
            "against the batch size, and do not hand over an iterator that can be read only once"
        )
    return batch
