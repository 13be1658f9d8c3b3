"""``plan``: everything that ``Trainer.fit`` does up to the first step, for a fake world of any size in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.contracts import CheckpointFunction, PlanReport
from lightning_autoparallel.lightning_compat import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    check_flavour,
)
from lightning_autoparallel.strategy.fake_world import PlanningStrategy
from lightning_autoparallel.strategy.mesh_search import search
from lightning_autoparallel.strategy.one_rank import alone, check_no_world
from lightning_autoparallel.strategy.planned_device import CPU
from lightning_autoparallel.strategy.shown_stages import planning_progress

# What a Trainer that only plans is given, whatever was asked for: one CPU process that keeps and shows nothing.
_REPLACED: Mapping[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "num_nodes": 1,
    "logger": False,
    "callbacks": [],
    "plugins": None,
    "profiler": None,
    "fast_dev_run": False,
    "barebones": False,
    "detect_anomaly": False,
    "sync_batchnorm": False,
    "min_epochs": None,
    "min_steps": None,
    "num_sanity_val_steps": 0,
    # one process reads the data: no rank's share may be empty because the world is large
    "use_distributed_sampler": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def planning_trainer(
    strategy: PlanningStrategy, options: Mapping[str, Any], trainer_class: Callable[..., Trainer]
) -> Trainer:
    """A Trainer that plans: ``options`` of the training's Trainer hold as far as they change its steps.

    Loggers, callbacks, profilers, plugins and devices do not; precision, limits and accumulation do, and whether a
    callback looks at gradients. Without a progress bar stages that take long are not shown either.
    """
    given = options.get("callbacks") or ()
    strategy.left_out = [given] if isinstance(given, Callback) else list(given)
    strategy.progress = planning_progress(options)
    replaced = {**_REPLACED, **strategy.planned_for.precision_options(options)}
    if strategy.global_batch_size is not None:  # so many micro-batches are taken as get there
        replaced["accumulate_grad_batches"] = 1
    return trainer_class(**{**options, **replaced, "strategy": strategy})


def run_planning(trainer: Trainer, module: LightningModule, datamodule: LightningDataModule | None) -> PlanReport:
    """Fit up to the first batch with a ``planning_trainer``; the fake world ends with it. Once for each mesh to try.

    Raises:
        ConfigError: a process group exists already, there is no batch to plan for, or the module is of Lightning's
            other package.
        AutoParallelError: the step cannot be captured or planned.
    """
    strategy = trainer.strategy
    assert isinstance(strategy, PlanningStrategy)
    check_flavour(module)
    if not strategy.candidates:
        return _plan_once(trainer, strategy, module, datamodule)

    with strategy.progress.stage("search for a mesh", len(strategy.candidates)) as running:

        def plan_on(mesh: MeshSpec) -> PlanReport:
            running.advance(str(mesh))
            strategy.plan_for(mesh)
            return _plan_once(trainer, strategy, module, datamodule)

        def others_like(best: MeshSpec) -> Sequence[MeshSpec]:
            found = strategy.others_like(best)
            running.total = len(strategy.candidates) + len(found)
            return found

        budget_gib = strategy.config.memory_budget_gib
        with strategy.dumping_nothing():
            found = search(
                strategy.candidates,
                plan_on,
                strategy.global_batch_size,
                budget_gib,
                others_like,
                trainer.accumulate_grad_batches,
            )
    if strategy.config.dump_dir is None:
        return found
    strategy.plan_for(MeshSpec.from_mapping(found.meshes[0].mesh))
    return replace(_plan_once(trainer, strategy, module, datamodule), meshes=found.meshes)


def _plan_once(
    trainer: Trainer, strategy: PlanningStrategy, module: LightningModule, datamodule: LightningDataModule | None
) -> PlanReport:
    check_no_world("planning")
    try:
        with alone():
            trainer.fit(module, datamodule=datamodule)
    finally:
        module.trainer = None
    assert strategy.report is not None, "fit ended without an error, so the strategy was set up"
    return strategy.report


def plan(
    module: LightningModule,
    batch: Any,
    mesh: MeshSpec | Mapping[str, int] | str | None = None,
    plan: str | Mapping[str, Any] = "auto",
    *,
    world_size: int,
    ranks_per_node: int | None = None,
    precision: Any = "32-true",
    inference: bool = False,
    reshard_after_forward: bool | Literal["auto"] = "auto",
    activation_checkpointing: str | CheckpointFunction = "none",
    batch_dims: Mapping[str, int | None] | None = None,
    disabled_passes: Sequence[str] = (),
    dump_dir: str | None = None,
    hardware: str | dict[str, Any] | None = None,
    decompose_matmuls: str | dict[str, Any] = "auto",
    memory_budget_gib: float | None = None,
    loss_chunks: int | Literal["auto"] = "auto",
    accumulate_grad_batches: int = 1,
    global_batch_size: int | None = None,
    device: str = CPU,
) -> PlanReport:
    """What training ``module`` on ``world_size`` ranks would run: captured, planned and counted in this process.

    Nothing is allocated for a module on the meta device, or one that is built in ``configure_model`` (which runs on
    meta, and leaves the module there).

    Args:
        module: the LightningModule; its ``training_step`` is planned.
        batch: what one data-parallel rank's dataloader gives; only shapes are used.
        mesh: axis sizes, outermost first; all ranks on ``dp_shard`` unless given. ``"auto"`` tries
            meshes of up to three axes that the ranks can form, and reports on the one predicted to take least time
            per sample of those that fit a rank's memory.
        plan: as AutoParallelStrategy takes it.
        world_size: ranks of the fake world.
        ranks_per_node: ranks of one node; those that the rates of ``hardware`` were measured with unless given.
        precision: as the Trainer takes it.
        inference: plan ``validation_step`` for the same batch too.
        reshard_after_forward: as AutoParallelStrategy takes it, like the arguments after it.
        batch_dims: which leaves' dim 0 is the batch.
        disabled_passes: graph passes to leave out.
        dump_dir: where to write graphs and the report.
        hardware: what times are predicted for.
        decompose_matmuls: as AutoParallelStrategy takes it.
        memory_budget_gib: what plan ``"auto"`` may use on a rank, and meshes that are tried.
        loss_chunks: as AutoParallelStrategy takes it.
        accumulate_grad_batches: as the Trainer takes it: the gradients of earlier micro-batches take memory too.
        global_batch_size: rows of one optimizer step, to which a mesh that is tried must get by whole micro-batches.
        device: what the step is captured for: ``"cuda"`` has it call CUDA's kernels, also where there is no GPU
            (``PlannedDevice`` says how).

    Raises:
        ConfigError: a process group is initialised, or an argument is wrong.
        CaptureError: the step cannot be captured.
    """
    strategy = PlanningStrategy(
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        inference=inference,
        mesh=dict(mesh.axes) if isinstance(mesh, MeshSpec) else mesh if isinstance(mesh, str | None) else dict(mesh),
        plan=plan,
        reshard_after_forward=reshard_after_forward,
        activation_checkpointing=activation_checkpointing,
        batch_dims=batch_dims,
        disabled_passes=list(disabled_passes),
        dump_dir=dump_dir,
        hardware=hardware,
        decompose_matmuls=decompose_matmuls,
        memory_budget_gib=memory_budget_gib,
        loss_chunks=loss_chunks,
        global_batch_size=global_batch_size,
        device=device,
    )
    options = {"precision": precision, "max_epochs": 1, "accumulate_grad_batches": accumulate_grad_batches}
    trainer = planning_trainer(strategy, options, Trainer)
    return run_planning(trainer, module, _OneBatch(batch))


class _OneBatch(LightningDataModule):
    """Hands out one batch, again and again if asked."""

    def __init__(self, batch: Any) -> None:
        super().__init__()
        self._loader = _Repeated(batch)

    def train_dataloader(self) -> Any:
        return self._loader

    def val_dataloader(self) -> Any:
        return self._loader


class _Repeated:
    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Any]:
        return iter((self._batch,))

    def __len__(self) -> int:
        return 1
