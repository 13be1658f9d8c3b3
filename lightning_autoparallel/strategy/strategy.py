"""``AutoParallelStrategy``: Lightning's hooks -> the stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_autoparallel.apply import rebind, shared_state, whole_state
from lightning_autoparallel.checkpoint import FILE_LIMIT_BYTES, WeightsToCome, gathered_bytes
from lightning_autoparallel.compile import check_compiler
from lightning_autoparallel.config import CaptureSpec, DecomposeSpec, EngineConfig, MeshSpec, PlanSpec
from lightning_autoparallel.contracts import CapturedGraph, CheckpointFunction, EarlierGradients, PlanReport
from lightning_autoparallel.cost import hardware_from
from lightning_autoparallel.lightning_compat import (
    A_TRAINER,
    LightningModule,
    Precision,
    Trainer,
    TrainerFn,
    check_flavour,
    rank_zero_info,
    rank_zero_warn,
    refuse_other_flavour,
)
from lightning_autoparallel.passes import all_passes, check_disabled
from lightning_autoparallel.pipeline import Draws, StepEngine
from lightning_autoparallel.pipeline.fused_updates import lay_out_for_fused
from lightning_autoparallel.pipeline.progress import StageProgress
from lightning_autoparallel.pipeline.sharded_updates import ShardedUpdates, needs_no_help
from lightning_autoparallel.pipeline.stages import StageContext
from lightning_autoparallel.pipeline.updates_at_once import updating
from lightning_autoparallel.plan.planner import plan_axes
from lightning_autoparallel.precision import FullPrecision, ShardedPrecision, supported_precision
from lightning_autoparallel.strategy.early_gradients import earlier_gradients, micro_batches
from lightning_autoparallel.strategy.held_optimizers import held_optimizers
from lightning_autoparallel.strategy.joined_metrics import joined_over_rows
from lightning_autoparallel.strategy.last_rows import share_out_rows
from lightning_autoparallel.strategy.launch import check_module, check_optimizer, check_trained
from lightning_autoparallel.strategy.lightning_tools import check_tools, count_every_row_once
from lightning_autoparallel.strategy.met_batches import meet_at_the_end
from lightning_autoparallel.strategy.out_of_memory import is_out_of_memory, memory_note
from lightning_autoparallel.strategy.outside_calls import OutsideCalls
from lightning_autoparallel.strategy.pruning import pruned_whole
from lightning_autoparallel.strategy.saving import SavingStrategy
from lightning_autoparallel.strategy.shown_stages import plan_summary, training_progress
from lightning_autoparallel.strategy.starting import shard_and_load, still_lies_in_shards
from lightning_autoparallel.strategy.steps import LightningSteps
from lightning_autoparallel.strategy.whole import made_whole
from lightning_autoparallel.torch_compat.anomaly import shards_asked_for_nan
from lightning_autoparallel.torch_compat.assignments import assigned_in_shards
from lightning_autoparallel.torch_compat.tree import tree_leaves


class AutoParallelStrategy(SavingStrategy):
    """Trains an unmodified LightningModule on a mesh of devices with the results of one device.

    Args:
        mesh: axis sizes, outermost first: ``dp_replicate``, ``dp_shard``, ``tp``; one may be -1 (to plan: or auto).
        plan: ``"auto"`` finds at the first training step where parameters lie and how everything is computed.
            ``"fsdp"`` shards parameters, gradients and optimizer state over all ``dp_*`` axes, ``"hsdp"`` over
            ``dp_shard`` only, ``"ddp"`` replicates them. ``{"base": ..., "rules": {...}}`` adds rules, on top of
            ``"auto"`` unless ``base`` names another; the name of a ``.json`` file is a plan that was dumped.
        reshard_after_forward: gather parameters again in the backward rather than keep them gathered; ``"auto"`` does
            what is faster where plan ``"auto"`` finds the memory for it, and with other plans gathers again.
        activation_checkpointing: what the backward recomputes rather than reads. ``"full"`` saves every block's
            inputs only, ``"layer:N"`` does so for every Nth block, ``"selective"`` saves attention, every second
            matmul and the first residual sum of each block; blocks are repeated modules, found by their paths, and
            ``"encoder.*=full, decoder.*=none"`` gives kinds of them their own. A function is given a ``NodeInfo`` for
            each operator and returns ``"save"``, ``"recompute"``, or ``"prefer_recompute"``: save only what code
            outside the block reads. Regions of ``torch.utils.checkpoint`` in the model stay as they are. ``"auto"``
            recomputes the least with which plan ``"auto"`` fits a rank, by kind of block, or what a plan's file says.
        compile: lower the graphs with Inductor; otherwise interpret them as they are.
        max_captures: how many kinds of batches and branches of a step are captured before it runs in forward mode, or,
            where ``capture="step"`` asks for whole steps only, is captured from the start again.
        dump_dir: where to write graphs before and after each pass, and reports.
        process_group_backend: NCCL on CUDA, gloo on CPU unless given; ``"cpu:gloo,cuda:nccl"`` has one for each.
        timeout: of collectives, and for ranks to end once another has failed.
        batch_dims: globs over leaf paths to 0 or null, for leaves whose dim 0 is wrongly taken (or not) for the batch.
        disabled_passes: graph passes to leave out, by name.
        bucket_mb: megabytes (1e6 bytes, of the gathered or not yet scattered tensor) that collectives of one block
            are merged up to; the size that fills the link unless given.
        save_distributed_checkpoint: write checkpoints as folders of every rank's shards (True), or as one file with
            whole tensors, as one device writes and loads it (False). ``"auto"`` writes files as long as the whole state
            has at most 8 GB. Both kinds are loaded either way, on any mesh.
        async_save: go on training once a checkpoint is copied to the host's memory, and write it meanwhile. What fails
            is an error at the next checkpoint, or at the end.
        leave_sharded: keep parameters in shards (DTensors) after ``fit`` and its siblings. Otherwise they and the
            optimizers' state are whole plain tensors on the host again, as after a training on one device, if they have
            at most 8 GB.
        hardware: what times are predicted for: ``"h100"`` or another name of ``cost.HARDWARE``, a mapping with rates of
            its own, ``{"base": "h100", "matmul_fraction": 0.6}``, or the file that ``calibrate`` writes; unless given,
            ``"cpu"`` over gloo, else rank 0's GPU.
        decompose_matmuls: where a matrix product reads what is gathered, or makes what is scattered, send it part by
            part beside the product. ``"auto"`` does so where the predicted step gets shorter (never over gloo),
            ``"always"`` wherever it may be, ``"never"`` nowhere; ``{"when": "auto", "order": "cyclic", "depth": 1}``
            also says in which order (``"swizzle"``, ``"cyclic"``, ``"broadcast"``) and how many parts are on their way
            at once.
        capture: ``"step"`` captures each step whole, as one graph of the global batch. ``"forward"`` runs its Python at
            every step on each rank's rows, as DDP does, and captures the modules that it calls, or those that
            ``{"forward": ["net", "head"]}`` names. ``"auto"`` captures it whole where what its Python reads and writes
            can be followed, else says why not and does as ``"forward"``.
        reduce_every_micro_batch: when gradients that several micro-batches add up (``accumulate_grad_batches``, or
            ``toggle_model(sync_grad=False)``) are reduced over the ranks. False: once, when the optimizer steps; on
            axes that shard a parameter every rank keeps its whole gradient until then. True: in every micro-batch.
            ``"auto"`` waits on the axes where the parameter is whole anyway, which costs no memory.
        memory_budget_gib: what plan ``"auto"`` may use on a rank, predicted; unless given nine tenths of the device's
            that has least.
        loss_chunks: in how many chunks of its rows a loss computes its widest value (a language model's logits), with
            its gradient; 1 for whole, ``"auto"`` where that lowers the predicted peak and costs next to no time.

    Raises:
        ConfigError: an argument is wrong, by itself or for the Trainer it is given to.
        PassError: ``disabled_passes`` names no pass.
    """

    strategy_name = "autoparallel"
    rehearses = False  # whether steps run in a world of which there is nobody else

    def __init__(
        self,
        mesh: dict[str, int] | str | None = None,
        plan: str | dict[str, Any] = "auto",
        reshard_after_forward: bool | Literal["auto"] = "auto",
        activation_checkpointing: str | CheckpointFunction = "none",
        compile: bool = True,
        max_captures: int = 8,
        dump_dir: str | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        batch_dims: dict[str, int | None] | None = None,
        disabled_passes: list[str] | None = None,
        bucket_mb: float | None = None,
        save_distributed_checkpoint: bool | Literal["auto"] = "auto",
        async_save: bool = False,
        leave_sharded: bool = False,
        hardware: str | dict[str, Any] | None = None,
        decompose_matmuls: str | dict[str, Any] = "auto",
        capture: str | dict[str, Any] = "auto",
        reduce_every_micro_batch: bool | Literal["auto"] = "auto",
        memory_budget_gib: float | None = None,
        loss_chunks: int | Literal["auto"] = "auto",
    ) -> None:
        spec = MeshSpec.from_mapping({"dp_shard": -1} if mesh is None else mesh)
        super().__init__(spec, process_group_backend, timeout, save_distributed_checkpoint, async_save)
        self.config = EngineConfig(
            plan=PlanSpec.parse(plan),
            reshard_after_forward=reshard_after_forward,
            activation_checkpointing=activation_checkpointing,
            compile=compile,
            max_captures=max_captures,
            dump_dir=dump_dir,
            disabled_passes=tuple(disabled_passes or ()),
            bucket_mb=bucket_mb,
            decompose_matmuls=DecomposeSpec.parse(decompose_matmuls),
            hardware=hardware,
            reduce_every_micro_batch=reduce_every_micro_batch,
            memory_budget_gib=memory_budget_gib,
            loss_chunks=loss_chunks,
        )
        if hardware is not None:
            hardware_from(hardware)
        check_disabled(self.config.disabled_passes, all_passes())
        self.batch_dims = batch_dims
        self.capture = CaptureSpec.parse(capture)
        self._engine_precision: str | None = None
        self._steps: LightningSteps | None = None
        self._ran = "training_step"  # or a sibling: the last that ran
        self._skips = self._is_sharded = self._told_plan = False
        self._while_set_up = ExitStack()
        self.leave_sharded = leave_sharded
        self.weights_to_come = WeightsToCome()
        # again: the other flavour may have been imported after this package
        refuse_other_flavour(AutoParallelStrategy.strategy_name, AutoParallelStrategy)

    def __getstate__(self) -> dict[str, Any]:
        """As that of ``WorldStrategy``."""
        anew = {"_steps": None, "_outside": None, "_is_sharded": False, "_while_set_up": ExitStack()}
        return {**super().__getstate__(), **anew}

    # -- what it shows -----------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> ShardedPrecision:
        """The Trainer's precision, as our plugin for it."""
        plugin = self._precision_plugin
        if plugin is None:
            return FullPrecision()
        assert isinstance(plugin, ShardedPrecision)
        return plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # the first that a Trainer hands over
        check_flavour(plugin, A_TRAINER)
        self._precision_plugin = None if plugin is None else supported_precision(plugin)

    @property
    def reports(self) -> dict[str, PlanReport]:
        """What was planned, by step; empty before the first capture."""
        return {} if self._engine is None else self._engine.reports

    @property
    def measured_launches(self) -> dict[str, int]:
        """Collectives that the last training step launched, by mesh axes."""
        return {} if self._steps is None else self._steps.launches.measured

    @property
    def predicted_launches(self) -> dict[str, int]:
        """Collectives in the final graphs of the training step that ran last, by mesh axes."""
        return {} if self._steps is None else self._steps.launches.predicted

    @property
    def modes(self) -> dict[str, str]:
        """How each step runs: ``"step"``, captured whole, or ``"forward"``, its own Python around captured modules."""
        return {} if self._steps is None else dict(self._steps.modes)

    # -- the model ---------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Start the process group and build the mesh."""
        if self.config.compile:
            check_compiler(self.root_device.type)
        if self.lightning_module is not None:
            check_tools(self.lightning_module.trainer, bool(self.config.plan.rules))
        super().setup_environment()
        plan_axes(self.config.plan, self.mesh)

    def setup(self, trainer: Trainer) -> None:
        """Shard the model and make the optimizers; the first batch of each step captures it."""
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._failed = self._told_plan = False
        module = self.lightning_module
        check_module(module, whole_steps=self.capture.mode == "step")
        engine = self._engine_for(module)
        if self._is_sharded:
            engine.shard_copies(trainer.callbacks)  # type: ignore[attr-defined]
        for optimizer in self._held_optimizers(trainer):
            rebind(optimizer, engine.replacements, shared_state)
        self._steps = LightningSteps(module, trainer, engine, self.capture)
        engine.optimizers, engine.placed = partial(self._all_optimizers, trainer), self._steps.forget_captures
        self._outside = OutsideCalls(engine)
        self._while_set_up.enter_context(self._outside.installed(self.precision_plugin))
        for around in (self._steps.around_hooks(), self.together_between_steps(trainer), joined_over_rows(self.mesh)):
            self._while_set_up.enter_context(around)
        self._while_set_up.enter_context(pruned_whole(trainer, self.whole_parameters))
        count_every_row_once(trainer, self.mesh)
        self._while_set_up.enter_context(assigned_in_shards(self._outside.assigned))
        self.restore(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.precision_plugin.ranks = self.mesh.submesh(self.mesh.spec.names)
        self.precision_plugin.skips_backward = lambda: self._skips
        self.precision_plugin.around_backward = self._around_backward
        self.precision_plugin.reduce_gradients = self._steps.reduce_gradients
        self.setup_precision_plugin()

    def _engine_for(self, module: LightningModule) -> StepEngine:
        precision = self.precision_plugin
        if self._engine is not None and self._engine.module is module and self._engine_precision == precision.precision:
            self._is_sharded = self._is_sharded and still_lies_in_shards(self._engine)
            if not self._is_sharded:
                precision.convert_module(module)  # layers may have been replaced since
                self._place_parameters(self._engine)
            return self._engine
        assert self._control is not None
        precision.convert_module(module)
        context = StageContext(
            mesh=self.mesh,
            config=replace(self.config, ranks_per_node=self.config.ranks_per_node or self.num_processes),
            control=self._control,
            warn=rank_zero_warn,
            progress=self._progress_of(module),
            rehearses=self.rehearses,
            earlier_gradients=partial(self._earlier_gradients, module),
            micro_batches=partial(self._micro_batches, module),
        )
        rows, draws = self.batch_dims, Draws(self._control.told_by_first(torch.initial_seed()))
        self._engine = StepEngine(module=module, context=context, device=self.root_device, batch_dims=rows, draws=draws)
        self._engine_precision = precision.precision
        self._place_parameters(self._engine)
        return self._engine

    def _earlier_gradients(self, module: LightningModule, captured: CapturedGraph) -> EarlierGradients:
        return earlier_gradients(module, self.optimizers, captured.name)

    def _micro_batches(self, module: LightningModule, captured: CapturedGraph) -> int:
        return micro_batches(module)

    def _progress_of(self, module: LightningModule) -> StageProgress:
        return training_progress(lambda: module.trainer)

    def _place_parameters(self, engine: StepEngine) -> None:
        """A step of its own, because planning for a fake world leaves it out."""
        assert self._control is not None
        with engine.context.progress.stage("place parameters"):
            shard_and_load(engine, self.weights_to_come, self._control)
        self._is_sharded = True

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Optimizers over the sharded parameters; those of an earlier fit would hold others."""
        self._optimizers, self._lightning_optimizers, self.lr_scheduler_configs = [], [], []
        super().setup_optimizers(trainer)
        assert self._engine is not None
        for optimizer in self._optimizers:
            # one that was made before the parameters were sharded trains what is in the module now
            rebind(optimizer, self._engine.replacements, shared_state)
            check_optimizer(optimizer)
            if self._is_sharded:
                check_trained(optimizer)

    def _held_optimizers(self, trainer: Trainer) -> list[Optimizer]:
        """Those that the module and callbacks step by themselves."""
        assert self.lightning_module is not None
        return held_optimizers([*self.lightning_module.modules(), *trainer.callbacks])  # type: ignore[attr-defined]

    def _all_optimizers(self, trainer: Trainer) -> list[Optimizer]:
        both = [*self.optimizers, *self._held_optimizers(trainer)]
        return list({id(optimizer): optimizer for optimizer in both}.values())

    def model_to_device(self) -> None:
        """Sharding has put every parameter where it belongs."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """``empty_init=True`` builds on meta: ``setup`` then makes the shards only."""
        context = torch.device("meta") if empty_init else nullcontext()
        with context, self.precision_plugin.tensor_init_context():
            yield

    def process_dataloader(self, dataloader: object) -> object:
        """Evaluations see each row once, whether ranks can share them out evenly or not."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        evaluates = trainer.evaluating or trainer.predicting  # neither before the launch
        if isinstance(dataloader, DataLoader) and evaluates:
            assert self._control is not None
            share_out_rows(dataloader, trainer, self._control)
        return self.draws_by_shard(dataloader)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around ``configure_model``: weights are loaded when the module lies in shards."""
        with self.weights_to_come.requested():
            yield

    # -- steps -------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step on this rank's batch; all ranks may skip it by None, as on one device."""
        assert self.lightning_module is not None
        output = self._run("training_step", (*args, *kwargs.values()))
        self._tell_plan()
        self._skips = output is None and self.lightning_module.automatic_optimization
        # Lightning refuses None where there are several processes, not knowing that all of them skip.
        return torch.full((), math.nan, device=self.root_device) if self._skips and self.world_size > 1 else output

    def _tell_plan(self) -> None:
        """Say once in a fit what its whole step does."""
        assert self._steps is not None
        if not self._told_plan and self._steps.modes.get("training_step") == "step":
            self._told_plan = True
            rank_zero_info(plan_summary(self.reports["training_step"]))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the validation step."""
        return self._run("validation_step", (*args, *kwargs.values()))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the test step."""
        return self._run("test_step", (*args, *kwargs.values()))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the predict step; a batched result is this rank's rows."""
        return self._run("predict_step", (*args, *kwargs.values()))

    def _run(self, name: str, args: tuple[Any, ...]) -> Any:
        assert self._steps is not None
        self._ran = name
        with self._outside.inside():
            return self._steps.run(name, args)

    @contextmanager
    def _around_backward(self) -> Iterator[None]:
        """Its collectives are counted with those of the forward."""
        assert self._steps is not None
        with self._outside.backward(), self._steps.backward(), shards_asked_for_nan():
            yield

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Around a micro-batch after which no optimizer steps: gradients that may wait are not reduced."""
        assert self._steps is not None
        with self._steps.accumulating():
            yield

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: nn.Module | None = None, **kwargs: Any
    ) -> Any:
        """Step the optimizer on the shards; its closure may run a step of the module."""
        assert self._steps is not None
        check_trained(optimizer)  # groups may have been added
        steps, updates = self._steps, None if needs_no_help(optimizer) else ShardedUpdates()
        resumed = steps.closing(closure)

        def run() -> Any:
            with updates.left() if updates else nullcontext():
                loss = resumed()
            steps.reduce_gradients()
            lay_out_for_fused(optimizer)
            return None if self._skips else steps.told_loss(optimizer, loss)

        around_update = self.precision_plugin.updating(updating)
        around = self._outside.optimizing(None if updates else optimizer)
        with around, steps.optimizing(), updates or nullcontext(), around_update:
            return super().optimizer_step(optimizer, run, model, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        """Add to an error that says that memory ran out what was predicted to need it."""
        super().on_exception(exception)
        if is_out_of_memory(exception) and self.lightning_module is not None:
            state = [optimizer.state for optimizer in self.optimizers]
            exception.add_note(
                memory_note(
                    self.reports,
                    self._ran,
                    self.config,
                    self.lightning_module.parameters(),
                    [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)],
                )
            )

    def teardown(self) -> None:
        """Write what is left to write, and give the module its whole parameters back."""
        well = False
        try:
            self._while_set_up.close()
            if self._steps is not None:
                self._steps.end()
            self.end_saving()
            self._give_back()
            assert self.cluster_environment is not None and self.accelerator is not None
            self.cluster_environment.teardown()
            self.precision_plugin.teardown()
            self.accelerator.teardown()
            self.checkpoint_io.teardown()
            well = not self._failed
        finally:
            self.leave_world(well)

    def _give_back(self) -> None:
        """After training the module is that of one device, where it fits."""
        module, engine = self.lightning_module, self._engine
        if module is None or engine is None or self._failed or self.leave_sharded or not self._is_sharded:
            return
        size = gathered_bytes(module, self._all_optimizers(module.trainer))
        if size > FILE_LIMIT_BYTES:
            rank_zero_info(
                f"autoparallel: parameters stay in shards: with the optimizers' state they have {size / 1e9:.3g} GB, "
                f"and up to {FILE_LIMIT_BYTES / 1e9:g} GB are gathered"
            )
            return
        meet_at_the_end(self._control)
        self._gather(engine, module.trainer)
        module._device_mesh = None

    def _gather(self, engine: StepEngine, trainer: Trainer) -> None:
        engine.gather_parameters()
        for optimizer in self._all_optimizers(trainer):
            rebind(optimizer, engine.replacements, whole_state)
        self._is_sharded = False

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Inside, the module and its optimizers are those of one device, and may be changed; every rank enters alike.

        Afterwards they lie in shards again, with their gradients, and steps are captured anew.
        """
        if self._engine is None or self._steps is None or not self._is_sharded:
            yield
            return
        assert self.lightning_module is not None
        optimizers = self._all_optimizers(self.lightning_module.trainer)
        self._is_sharded = False
        try:
            with made_whole(self._engine, self._steps, optimizers):
                yield
        finally:
            self._is_sharded = True
