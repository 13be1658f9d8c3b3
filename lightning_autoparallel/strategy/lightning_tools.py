"""Lightning's own callbacks, loggers and plugins that must be told of a mesh, or cannot work on one."""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.lightning_compat import (
    ModelPruning,
    StochasticWeightAveraging,
    TensorBoardLogger,
    ThroughputMonitor,
    TorchSyncBatchNorm,
    Trainer,
    TrainerFn,
    WeightAveraging,
    layer_sync,
)
from lightning_autoparallel.mesh import ParallelMesh

_AVERAGING = (WeightAveraging, StochasticWeightAveraging)


def check_tools(trainer: Trainer, has_rules: bool) -> None:
    """Refuse what a Trainer's callbacks and loggers would do to parameters that lie in shards.

    Raises:
        ConfigError: one of them traces the module on one rank alone, prunes what it cannot, or changes its layers.
    """
    synced = layer_sync(trainer)
    if synced is not None and type(synced) is not TorchSyncBatchNorm:
        raise ConfigError(
            f"{type(synced).__name__} puts layers of its own into the module, which would join ranks beside the mesh: "
            "leave the plugin out, and give the Trainer sync_batchnorm=True for batch norms of all ranks' rows"
        )
    pruning = [callback for callback in trainer.callbacks if isinstance(callback, ModelPruning)]  # type: ignore[attr-defined]
    if pruning and has_rules:
        raise ConfigError(
            f"{type(pruning[0]).__name__} renames parameters (weight becomes weight_orig), and the plan has rules, "
            "which name them: train with a plan without rules, such as fsdp, or prune the module after fit"
        )
    averaging = [found for found in trainer.callbacks if isinstance(found, _AVERAGING)]  # type: ignore[attr-defined]
    if pruning and averaging:
        raise ConfigError(
            f"{type(pruning[0]).__name__} beside {type(averaging[0]).__name__}: the averaged copy lies in shards, as "
            "the module does, and is not pruned with it: leave one of them out"
        )
    if pruning and any(isinstance(parameter, DTensor) for parameter in trainer.lightning_module.parameters()):
        raise ConfigError(
            f"{type(pruning[0]).__name__} copies weights before a fit, and they lie in shards: leave_sharded=True was "
            "given, or they are larger than 8 GB"
        )
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and logger._log_graph:
            raise ConfigError(
                "TensorBoardLogger(log_graph=True) traces the module on rank 0 alone, which has but its shards: leave "
                "log_graph out, or call logger.log_graph(module) after fit"
            )


def syncs_norms(trainer: Trainer) -> bool:
    """Whether batch norms were asked to take the rows of all ranks; as elsewhere in Lightning, while it fits."""
    return layer_sync(trainer) is not None and trainer.state.fn == TrainerFn.FITTING


def count_every_row_once(trainer: Trainer, mesh: ParallelMesh) -> None:
    """ThroughputMonitor multiplies one rank's rows by all ranks; those that are on other axes have the same rows.

    The devices that share rows do one batch's FLOPs together, so that each does its part of what is available.
    """
    alike = mesh.device_mesh.size() // mesh.data_parallel_size
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, ThroughputMonitor) or alike == 1:
            continue
        for throughput in callback._throughputs.values():
            throughput.world_size = mesh.data_parallel_size
            if callback.available_flops is not None:
                throughput.available_flops = callback.available_flops * alike
