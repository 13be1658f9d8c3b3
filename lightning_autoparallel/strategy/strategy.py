"""``AutoParallelStrategy``: Lightning's hooks -> the stages."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_autoparallel.checkpoint import (
    load_sharded_checkpoint,
    model_state,
    optimizer_state,
    save_sharded_checkpoint,
)
from lightning_autoparallel.compile import check_compiler
from lightning_autoparallel.config import EngineConfig, MeshSpec, PlanSpec
from lightning_autoparallel.contracts import PlanReport
from lightning_autoparallel.errors import AutoParallelError, ConfigError
from lightning_autoparallel.mesh import ParallelMesh, build_mesh
from lightning_autoparallel.passes import all_passes, check_disabled
from lightning_autoparallel.pipeline import ControlGroup, StepEngine
from lightning_autoparallel.pipeline.stages import StageContext
from lightning_autoparallel.plan.named import plan_axes
from lightning_autoparallel.precision import check_precision
from lightning_autoparallel.strategy.launch import check_launch, check_module
from lightning_autoparallel.strategy.recorder import ALREADY_GLOBAL
from lightning_autoparallel.strategy.sampling import sample_training_batch
from lightning_autoparallel.strategy.steps import LightningSteps


class AutoParallelStrategy(ParallelStrategy):
    """Trains an unmodified LightningModule on a mesh of devices with the results of one device.

    Args:
        mesh: axis sizes, outermost first: ``dp_replicate``, ``dp_shard``, ``tp``; one may be -1.
        plan: ``"fsdp"`` shards parameters, gradients and optimizer state over all ``dp_*`` axes,
            ``"ddp"`` replicates them.
        reshard_after_forward: gather parameters again in the backward rather than keep them gathered.
        compile: lower the graphs with Inductor; otherwise interpret them as they are.
        max_captures: how many kinds of batches and branches a step may have before it is refused.
        dump_dir: where to write graphs before and after each pass, and reports.
        process_group_backend: NCCL on CUDA and gloo on CPU unless given.
        timeout: of collectives.
        batch_dims: for leaves whose dim 0 is wrongly taken (or not taken) for the batch: globs over leaf paths to 0
            or null.
        disabled_passes: graph passes to leave out, by name.

    Raises:
        ConfigError: an argument is wrong, by itself or for the Trainer it is given to.
        PassError: ``disabled_passes`` names no pass.
    """

    strategy_name = "autoparallel"

    def __init__(
        self,
        mesh: dict[str, int] | None = None,
        plan: str | dict[str, Any] = "fsdp",
        reshard_after_forward: bool = True,
        compile: bool = True,
        max_captures: int = 8,
        dump_dir: str | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        batch_dims: dict[str, int | None] | None = None,
        disabled_passes: list[str] | None = None,
    ) -> None:
        super().__init__()
        self.spec = MeshSpec.from_mapping({"dp_shard": -1} if mesh is None else mesh)
        self.config = EngineConfig(
            plan=PlanSpec.parse(plan),
            reshard_after_forward=reshard_after_forward,
            compile=compile,
            max_captures=max_captures,
            dump_dir=dump_dir,
            disabled_passes=tuple(disabled_passes or ()),
        )
        check_disabled(self.config.disabled_passes, all_passes())
        self.num_nodes = 1
        self.process_group_backend = process_group_backend
        self.timeout = timeout
        self.batch_dims = batch_dims
        self._mesh: ParallelMesh | None = None
        self._control: ControlGroup | None = None
        self._engine: StepEngine | None = None
        self._steps: LightningSteps | None = None

    # -- what the launch looks like ----------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Always: Lightning then shards the sampler."""
        return True

    @property
    def root_device(self) -> torch.device:
        """This process's device."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def mesh(self) -> ParallelMesh:
        """The mesh with its flattened sub-meshes.

        Raises:
            ConfigError: the processes have not been started yet.
        """
        if self._mesh is None:
            raise ConfigError(
                "the device mesh exists once the Trainer has started its processes: from configure_model on"
            )
        return self._mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """Torch's view of the mesh, there from ``configure_model`` on."""
        return self.mesh.device_mesh

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different rows."""
        return self.mesh.data_parallel_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Rows are shared out over the batch axes only."""
        return {"num_replicas": self.mesh.data_parallel_size, "rank": self.mesh.data_parallel_rank}

    @property
    def precision_plugin(self) -> Precision:
        """The Trainer's precision."""
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else check_precision(plugin)

    @property
    def reports(self) -> dict[str, PlanReport]:
        """What was planned, by step; empty before the first capture."""
        return {} if self._engine is None else self._engine.reports

    @property
    def measured_launches(self) -> dict[str, int]:
        """Collectives that the last training step launched, by mesh axes."""
        return {} if self._steps is None else self._steps.measured_launches

    # -- processes ---------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        check_launch(self.spec, self.num_processes * self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Start the process group and build the mesh."""
        if self.config.compile:
            check_compiler(self.root_device.type)
        super().setup_environment()
        reset_seed()
        self._set_world_ranks()
        if self._mesh is None:
            self.process_group_backend = self.process_group_backend or _get_default_process_group_backend_for_device(
                self.root_device
            )
            assert self.cluster_environment is not None
            device_id = self.root_device if self.root_device.type != "cpu" else None
            _init_dist_connection(
                self.cluster_environment, self.process_group_backend, timeout=self.timeout, device_id=device_id
            )
            # Lightning leaves gloo groups to the interpreter's exit, where their threads may abort the process.
            atexit.register(_destroy_process_groups)
            self._mesh = build_mesh(self.spec, self.root_device.type)
            self._control = ControlGroup(self.timeout)
        plan_axes(self.config.plan.base, self._mesh)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._mesh.device_mesh

    def _set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    # -- the model ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Shard the model, make the optimizers, capture the training step."""
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        check_module(module)
        engine = self._engine_for(module)
        self._steps = LightningSteps(module, trainer, engine)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            self._prepare_training_step(trainer, self._steps)

    def _engine_for(self, module: LightningModule) -> StepEngine:
        if self._engine is not None and self._engine.module is module:
            return self._engine
        assert self._control is not None
        context = StageContext(
            mesh=self.mesh, config=self.config, control=self._control, warn=rank_zero_warn, progress=_show_progress
        )
        seed = self._control.gather(torch.initial_seed())[0]
        self._engine = StepEngine(
            module=module, context=context, device=self.root_device, batch_dims=self.batch_dims, seed=seed
        )
        self._place_parameters(self._engine)
        return self._engine

    def _place_parameters(self, engine: StepEngine) -> None:
        """A step of its own, because planning for a fake world leaves it out."""
        engine.shard_parameters()

    def _prepare_training_step(self, trainer: Trainer, steps: LightningSteps) -> None:
        """Capture before the first step, so that what is wrong with it shows before anything has run."""
        found, batch = sample_training_batch(trainer)
        if not found:
            return
        try:
            report = steps.prepare("training_step", batch)
        except AutoParallelError:
            raise
        except Exception as error:
            # The step may need what on_train_start sets up: its first call will show whether it works.
            rank_zero_warn(
                f"training_step could not be captured before training ({type(error).__name__}: {error}): it will be at "
                "its first step"
            )
            return
        rank_zero_info(_summary(report))

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Optimizers over the sharded parameters; those of an earlier fit would hold others."""
        self._optimizers, self._lightning_optimizers, self.lr_scheduler_configs = [], [], []
        super().setup_optimizers(trainer)

    def model_to_device(self) -> None:
        """Sharding has put every parameter where it belongs."""

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """``empty_init=True`` builds on meta: ``setup`` then makes the shards only."""
        context = torch.device("meta") if empty_init else contextlib.nullcontext()
        with context, self.precision_plugin.tensor_init_context():
            yield

    # -- steps -------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the captured training step on this rank's batch."""
        return self._run("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the captured validation step."""
        return self._run("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the captured test step."""
        return self._run("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the captured predict step; a batched result is this rank's rows."""
        return self._run("predict_step", args, kwargs)

    def _run(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        assert self._steps is not None
        return self._steps.run(name, args, kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the captured backward; its collectives are counted with those of the forward."""
        assert self._steps is not None
        with self._steps.counting():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    # -- talking -----------------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if not _distributed_is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank ``src``."""
        if not _distributed_is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """A tensor reduced over all ranks; anything else as it is."""
        if not isinstance(tensor, Tensor) or group is ALREADY_GLOBAL:
            return tensor
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    def teardown(self) -> None:
        """Leave the shards where they are: they may be used again."""
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Shards are loaded into shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """``load_checkpoint`` restores optimizers with the model."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's shards of the model."""
        assert self.lightning_module is not None
        return model_state(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's shards of an optimizer's state."""
        assert self.lightning_module is not None
        return optimizer_state(self.lightning_module, optimizer)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Done by ``load_checkpoint``."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Done by ``load_checkpoint``."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a folder with every rank's shards."""
        if storage_options is not None:
            raise ConfigError(
                "storage_options are not supported: sharded checkpoints are written by torch, not by Lightning"
            )
        assert self._engine is not None
        save_sharded_checkpoint(
            checkpoint,
            Path(self.broadcast(filepath)),
            random_state=self._engine.random_state,
            is_first=self.is_global_zero,
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a sharded checkpoint into the sharded model and its optimizers."""
        assert self.lightning_module is not None
        checkpoint, random_state = load_sharded_checkpoint(
            Path(self.broadcast(checkpoint_path)),
            self.lightning_module,
            self.optimizers,
            strict=self.lightning_module.strict_loading,
            weights_only=weights_only,
        )
        if self._engine is not None:
            self._engine.random_state = random_state
        return checkpoint


def _destroy_process_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _show_progress(graph: str, stage: str, seconds: float) -> None:
    rank_zero_info(f"autoparallel: {stage} {graph}: {seconds:.2f} s")


def _summary(report: PlanReport) -> str:
    mesh = ", ".join(f"{name}: {size}" for name, size in report.mesh.items())
    launches = ", ".join(f"{count} on {axes}" for axes, count in report.launches().items()) or "none"
    peak = report.predicted_peak_bytes
    shown = "" if peak is None else f", predicted peak {peak / 2**30:.2f} GiB"
    return f"autoparallel: mesh {{{mesh}}}, plan {report.plan}, collectives per step: {launches}{shown}"
