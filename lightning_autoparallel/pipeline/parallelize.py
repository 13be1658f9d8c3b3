"""``parallelize``: the engine without a Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autoparallel.capture import NoEffects, Watcher, flatten_batch
from lightning_autoparallel.compile import check_compiler
from lightning_autoparallel.config import DecomposeSpec, EngineConfig, MeshSpec, PlanSpec
from lightning_autoparallel.contracts import CheckpointFunction, PlanReport
from lightning_autoparallel.cost import hardware_from
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.mesh import ParallelMesh, build_mesh
from lightning_autoparallel.passes import all_passes, check_disabled
from lightning_autoparallel.pipeline.agreement import ControlGroup
from lightning_autoparallel.pipeline.engine import StepCall, StepEngine
from lightning_autoparallel.pipeline.same_order import check_same_plan
from lightning_autoparallel.pipeline.seeds import Draws
from lightning_autoparallel.pipeline.stages import StageContext
from lightning_autoparallel.pipeline.traced import TracedCalls, call_traced


class ParallelModule(nn.Module):
    """A module whose forward and backward run as one parallel program; ``module`` holds its sharded parameters."""

    def __init__(self, module: nn.Module, engine: StepEngine) -> None:
        super().__init__()
        self.module = module
        self._engine = engine
        self._traced = TracedCalls(engine, self._call)

    @property
    def report(self) -> PlanReport:
        """What was planned for the last captured call."""
        return next(reversed(self._engine.reports.values()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run on this rank's part of the batch: global scalars come back whole, batched results as this rank's rows.

        Under ``torch.compile`` the batch must be like one that was run or prepared before.
        """
        if torch.compiler.is_dynamo_compiling():
            return call_traced(self.module, self._traced, args, kwargs)
        return self._engine.execute(self._call(self._trains()), (args, kwargs), {}).output

    def prepare(self, *args: Any, **kwargs: Any) -> PlanReport:
        """Capture the call for batches like this rank's part of one, without running it; every rank calls it alike."""
        return self._engine.prepare(self._call(self._trains()), (args, kwargs), {})

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.module.parameters())

    def _call(self, training: bool) -> StepCall:
        return StepCall(
            name="forward_backward" if training else "forward",
            run=lambda batch, watcher: self.module(*batch[0], **batch[1]),
            effects=_no_effects,
            training=training,
        )


def _no_effects(watcher: Watcher) -> NoEffects:
    return NoEffects()


def parallelize(
    module: nn.Module,
    sample_args: tuple[Any, ...],
    mesh: MeshSpec | Mapping[str, int] | ParallelMesh,
    plan: str | Mapping[str, Any] = "auto",
    *,
    reshard_after_forward: bool | Literal["auto"] = "auto",
    activation_checkpointing: str | CheckpointFunction = "none",
    compile: bool = True,
    max_captures: int = 8,
    dump_dir: str | None = None,
    batch_dims: int | Mapping[str, int | None] | None = None,
    disabled_passes: Sequence[str] = (),
    bucket_mb: float | None = None,
    decompose_matmuls: str | Mapping[str, Any] = "auto",
    loss_chunks: int | Literal["auto"] = "auto",
    hardware: str | Mapping[str, Any] | None = None,
    memory_budget_gib: float | None = None,
    device: torch.device | str | None = None,
    timeout: timedelta = timedelta(minutes=30),
) -> ParallelModule:
    """Shard ``module`` in place and capture its forward and backward for batches like ``sample_args``.

    The default process group must be initialised. ``sample_args`` are positional arguments for the *global* batch; the
    returned module takes each rank's part of it (rows by data-parallel rank). A 0-dim result is the global one, one
    with the batch in dim 0 is this rank's rows. ``plan``, ``reshard_after_forward``, ``activation_checkpointing``,
    ``decompose_matmuls``, ``loss_chunks``, ``hardware`` and ``memory_budget_gib`` are as AutoParallelStrategy takes
    them. ``device`` defaults to the module's, or the CPU for a meta module.

    Raises:
        ConfigError: no process group, a mesh that does not fit it, or a sample that does not divide by the batch axes.
        CaptureError: the forward cannot be recorded.
    """
    if not dist.is_initialized():
        raise ConfigError("parallelize needs a process group: call torch.distributed.init_process_group first")
    target = torch.device(device) if device is not None else _device_of(module)
    config = EngineConfig(
        plan=PlanSpec.parse(plan),
        reshard_after_forward=reshard_after_forward,
        activation_checkpointing=activation_checkpointing,
        compile=compile,
        max_captures=max_captures,
        dump_dir=dump_dir,
        disabled_passes=tuple(disabled_passes),
        bucket_mb=bucket_mb,
        decompose_matmuls=DecomposeSpec.parse(decompose_matmuls),
        loss_chunks=loss_chunks,
        hardware=hardware,
        memory_budget_gib=memory_budget_gib,
    )
    if hardware is not None:
        hardware_from(hardware)
    check_disabled(config.disabled_passes, all_passes())
    if compile:
        check_compiler(target.type)
    built = mesh if isinstance(mesh, ParallelMesh) else build_mesh(MeshSpec.from_mapping(mesh), target.type)
    context = StageContext(mesh=built, config=config, control=ControlGroup(timeout), warn=_warn)
    seed = context.control.told_by_first(torch.initial_seed())
    engine = StepEngine(module=module, context=context, device=target, batch_dims=batch_dims, draws=Draws(seed))
    check_same_plan(config.plan, context.control)
    engine.shard_parameters()
    parallel = ParallelModule(module, engine)
    local = _local_sample((sample_args, {}), built.data_parallel_size, target)
    engine.prepare(parallel._call(parallel._trains()), local, {})
    return parallel


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def _device_of(module: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in module.parameters() if not parameter.is_meta}
    return devices.pop() if devices else torch.device("cpu")


def _local_sample(sample: Any, shards: int, device: torch.device) -> Any:
    """The first rank's part of a global sample; only its shapes are used."""
    leaves, rebuild = flatten_batch(sample)
    length = next((leaf.shape[0] for _, leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 0)
    if length % shards:
        raise ConfigError(
            f"the sample has {length} rows, which {shards} batch shards cannot share: give a multiple of {shards}"
        )

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == length:
            return leaf[: length // shards].to(device)
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    return rebuild([cut(leaf) for _, leaf in leaves])
