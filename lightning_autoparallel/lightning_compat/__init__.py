"""The one door to Lightning: the names that the package uses, from the flavour that this process trains with.

Type checkers see those of ``lightning.pytorch``; ``pytorch_lightning`` has the same. What Lightning keeps private has a
public name here. The command line is in ``lightning_compat.cli``.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import DistributedSampler

from lightning_autoparallel.lightning_compat.flavour import (
    A_TRAINER,
    FLAVOUR,
    OTHER_FLAVOUR,
    UNIFIED,
    check_flavour,
    mixed_flavours,
    refuse_other_flavour,
)

if TYPE_CHECKING or FLAVOUR == UNIFIED:
    from lightning import __version__ as LIGHTNING_VERSION
    from lightning.fabric.utilities import distributed
    from lightning.fabric.utilities.seed import pl_worker_init_function, reset_seed
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.callbacks import (
        Callback,
        GradientAccumulationScheduler,
        ModelPruning,
        StochasticWeightAveraging,
        ThroughputMonitor,
        WeightAveraging,
    )
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.loggers import TensorBoardLogger
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.overrides import distributed as samplers
    from lightning.pytorch.plugins import TorchCheckpointIO, TorchSyncBatchNorm
    from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment
    from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
    from lightning.pytorch.strategies import (
        DDPStrategy,
        ModelParallelStrategy,
        ParallelStrategy,
        Strategy,
        StrategyRegistry,
    )
    from lightning.pytorch.strategies.launchers.subprocess_script import (
        _SubprocessScriptLauncher as SubprocessScriptLauncher,
    )
    from lightning.pytorch.trainer import call as trainer_calls
    from lightning.pytorch.trainer.connectors import data_connector
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import grad_norm
    from lightning.pytorch.utilities.data import extract_batch_size
    from lightning.pytorch.utilities.enums import GradClipAlgorithmType
    from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
    from lightning.pytorch.utilities.rank_zero import (
        rank_zero_debug,
        rank_zero_info,
        rank_zero_only,
        rank_zero_warn,
    )
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
    from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
else:
    from lightning_fabric.utilities import distributed
    from lightning_fabric.utilities.seed import pl_worker_init_function, reset_seed
    from pytorch_lightning import LightningDataModule, LightningModule, Trainer
    from pytorch_lightning import __version__ as LIGHTNING_VERSION
    from pytorch_lightning.callbacks import (
        Callback,
        GradientAccumulationScheduler,
        ModelPruning,
        StochasticWeightAveraging,
        ThroughputMonitor,
        WeightAveraging,
    )
    from pytorch_lightning.core.optimizer import LightningOptimizer
    from pytorch_lightning.loggers import TensorBoardLogger
    from pytorch_lightning.loggers.logger import DummyLogger
    from pytorch_lightning.overrides import distributed as samplers
    from pytorch_lightning.plugins import TorchCheckpointIO, TorchSyncBatchNorm
    from pytorch_lightning.plugins.environments import ClusterEnvironment, LightningEnvironment
    from pytorch_lightning.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
    from pytorch_lightning.strategies import (
        DDPStrategy,
        ModelParallelStrategy,
        ParallelStrategy,
        Strategy,
        StrategyRegistry,
    )
    from pytorch_lightning.strategies.launchers.subprocess_script import (
        _SubprocessScriptLauncher as SubprocessScriptLauncher,
    )
    from pytorch_lightning.trainer import call as trainer_calls
    from pytorch_lightning.trainer.connectors import data_connector
    from pytorch_lightning.trainer.states import TrainerFn
    from pytorch_lightning.utilities import grad_norm
    from pytorch_lightning.utilities.data import extract_batch_size
    from pytorch_lightning.utilities.enums import GradClipAlgorithmType
    from pytorch_lightning.utilities.exceptions import MisconfigurationException, SIGTERMException
    from pytorch_lightning.utilities.rank_zero import (
        rank_zero_debug,
        rank_zero_info,
        rank_zero_only,
        rank_zero_warn,
    )
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
    from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig


def weights_only_of_run() -> bool | None:
    """What ``fit`` or a sibling was given as ``weights_only``: Lightning 2.6 forgets it where shards are restored.

    ``Trainer._run`` does not hand it on to strategies that restore after setup, so it is read from that call's frame.
    """
    given = (_arguments_of_run() or {}).get("weights_only")
    return given if isinstance(given, bool) else None


def gets_checkpoints(module: LightningModule, hook: Literal["on_load_checkpoint", "on_save_checkpoint"]) -> bool:
    """Whether a hook of the module or of a callback is given checkpoints, of which it may keep or change parts.

    That of a module without a Trainer may be, whose callbacks are not known.
    """
    if module._trainer is None:
        return True
    callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
    hooks: list[tuple[Any, Any]] = [(getattr(module, hook), getattr(LightningModule, hook))]
    hooks += [(getattr(callback, hook), getattr(Callback, hook)) for callback in callbacks]
    if hook == "on_load_checkpoint":
        hooks.append((module.load_state_dict, LightningModule.load_state_dict))
    return any(getattr(given, "__func__", None) is not plain for given, plain in hooks)


def hears_of_cleared_gradients(module: LightningModule, callbacks: Sequence[Callback]) -> bool:
    """Whether the module or a callback has a hook that runs where a training clears gradients."""
    hooks: list[tuple[Any, Any]] = [(each.on_before_zero_grad, Callback.on_before_zero_grad) for each in callbacks]
    hooks.append((module.on_before_zero_grad, LightningModule.on_before_zero_grad))
    hooks.append((module.optimizer_zero_grad, LightningModule.optimizer_zero_grad))
    return any(getattr(given, "__func__", None) is not plain for given, plain in hooks)


def begins_to_accumulate(trainer: Trainer) -> bool:
    """Whether the batch that trains now is the first of those whose gradients add up, perhaps the only one."""
    return bool(trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0)


def skips_backward(trainer: Trainer) -> bool:
    """Whether a training runs forwards only, as for the statistics of averaged weights."""
    return bool(trainer.fit_loop._skip_backward)


def layer_sync(trainer: Trainer) -> Any:
    """What a Trainer was given to make layers talk to other ranks (``sync_batchnorm``); None for nothing."""
    return trainer.strategy._layer_sync  # type: ignore[attr-defined]


def restore_modules_and_callbacks(trainer: Trainer) -> None:
    """Load model, datamodule and callbacks from what ``fit`` or a sibling was given as ``ckpt_path``, if anything.

    ``Trainer._run`` does so before setup or after ``on_fit_start``, and keeps the path to itself until then.
    """
    given = _arguments_of_run()
    assert given is not None, "a strategy is set up by Trainer._run, and by nothing else"
    trainer._checkpoint_connector._restore_modules_and_callbacks(given["ckpt_path"])


_SAVE_CODE = inspect.unwrap(Trainer.save_checkpoint).__code__  # Lightning's own: an override may look at what it dumps


def is_saved_by_trainer() -> bool:
    """Whether what is asked for now is given to the strategy's ``save_checkpoint`` next, but for hooks."""
    return _caller(lambda frame: frame.f_code is _SAVE_CODE) is not None


def _arguments_of_run() -> dict[str, Any] | None:
    """What the run of a Trainer was given, whoever has wrapped its method; None outside of a run."""
    frame = _caller(_is_run)
    return None if frame is None else frame.f_locals


def _is_run(frame: FrameType) -> bool:
    if frame.f_code.co_name != Trainer._run.__name__:
        return False
    return isinstance(frame.f_locals.get("self"), Trainer) and "ckpt_path" in frame.f_locals


def _caller(is_wanted: Callable[[FrameType], bool]) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_wanted(frame):
        frame = frame.f_back
    return frame


def keep_samplers(trainer: Trainer) -> None:
    """Loaders keep the samplers that they were made with: Lightning's own would shuffle rows in training."""
    trainer._accelerator_connector.use_distributed_sampler = False


def injected_samplers() -> tuple[type, ...]:
    """What Lightning shares rows out over ranks with."""
    return (
        DistributedSampler,
        distributed.DistributedSamplerWrapper,
        samplers.UnrepeatedDistributedSampler,
        samplers.UnrepeatedDistributedSamplerWrapper,
    )


def batch_samplers_that_keep_indices() -> tuple[type, ...]:
    """What Lightning wraps batch samplers in where it predicts; the wrapped one is ``_batch_sampler``."""
    return (samplers._IndexBatchSamplerWrapper,)


def current_loader(trainer: Trainer, index: int) -> Any:
    """The ``index``-th loader of the evaluation that runs, None where there is none."""
    combined = getattr(trainer._active_loop, "_combined_loader", None)
    return combined.flattened[index] if combined is not None and index < len(combined.flattened) else None


def evaluates_one_by_one(trainer: Trainer) -> bool:
    """Whether the loaders of the evaluation that runs come one after the other, not several at once."""
    combined = getattr(trainer._active_loop, "_combined_loader", None)
    return combined is None or combined._mode == "sequential"


def batches_begun(trainer: Trainer) -> int:
    """How many batches the evaluation that runs has begun, of all its loaders."""
    return int(trainer._active_loop.batch_progress.current.ready)  # type: ignore[union-attr]


def is_of_lightning(module: str) -> bool:
    """Whether what is defined in a Python module is Lightning's, not a user's."""
    return module.partition(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning")


def is_called_by_loop(module: LightningModule, hook: str) -> bool:
    """Whether the strategy's ``hook`` that runs was called by the Trainer, not by a user's code."""
    return module._current_fx_name == hook


def signals_of(trainer: Trainer) -> Any:
    """What handles signals to this process, and knows whether it was told to end."""
    return trainer._signal_connector


def kept_predictions(trainer: Trainer) -> list[tuple[Any, list[Any], list[Any]]]:
    """Of each loader: it, what was predicted of its batches, and of which rows; empty where nobody asks for that."""
    loop = trainer.predict_loop
    loaders = loop._combined_loader.flattened if loop._combined_loader is not None else []
    return list(zip(loaders, loop._predictions, loop.epoch_batch_indices, strict=True))


all_gather_if_available = distributed._all_gather_ddp_if_available
default_process_group_backend = distributed._get_default_process_group_backend_for_device
distributed_is_initialized = distributed._distributed_is_initialized
init_process_group = distributed._init_dist_connection
set_num_threads_if_needed = distributed._set_num_threads_if_needed
sync_if_available = distributed._sync_ddp_if_available

__all__ = [
    "A_TRAINER",
    "FLAVOUR",
    "LIGHTNING_VERSION",
    "OTHER_FLAVOUR",
    "Callback",
    "ClusterEnvironment",
    "DDPStrategy",
    "DoublePrecision",
    "DummyLogger",
    "GradClipAlgorithmType",
    "GradientAccumulationScheduler",
    "HalfPrecision",
    "LightningDataModule",
    "LightningEnvironment",
    "LightningModule",
    "LightningOptimizer",
    "MisconfigurationException",
    "MixedPrecision",
    "ModelParallelStrategy",
    "ModelPruning",
    "OptimizerLRSchedulerConfig",
    "ParallelStrategy",
    "Precision",
    "SIGTERMException",
    "StochasticWeightAveraging",
    "Strategy",
    "StrategyRegistry",
    "SubprocessScriptLauncher",
    "TensorBoardLogger",
    "ThroughputMonitor",
    "TorchCheckpointIO",
    "TorchSyncBatchNorm",
    "Trainer",
    "TrainerFn",
    "WeightAveraging",
    "all_gather_if_available",
    "batch_samplers_that_keep_indices",
    "batches_begun",
    "begins_to_accumulate",
    "check_flavour",
    "current_loader",
    "data_connector",
    "default_process_group_backend",
    "distributed_is_initialized",
    "evaluates_one_by_one",
    "extract_batch_size",
    "gets_checkpoints",
    "grad_norm",
    "hears_of_cleared_gradients",
    "init_process_group",
    "injected_samplers",
    "is_called_by_loop",
    "is_of_lightning",
    "is_param_in_hook_signature",
    "is_saved_by_trainer",
    "kept_predictions",
    "layer_sync",
    "mixed_flavours",
    "pl_worker_init_function",
    "rank_zero_debug",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "refuse_other_flavour",
    "reset_seed",
    "restore_modules_and_callbacks",
    "set_num_threads_if_needed",
    "signals_of",
    "sync_if_available",
    "trainer_calls",
    "weights_only_of_run",
]
