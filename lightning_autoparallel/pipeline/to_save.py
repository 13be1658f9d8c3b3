"""What a step will save for its backward, as it is known before it is planned."""

from __future__ import annotations

from lightning_autoparallel.compile import saved_values
from lightning_autoparallel.config import AUTO, EngineConfig
from lightning_autoparallel.contracts import CapturedGraph, CheckpointFunction
from lightning_autoparallel.passes import ChunkOptions, calls_in_chunks


def chunk_options(config: EngineConfig) -> ChunkOptions:
    """How the setting has heads of losses computed."""
    return ChunkOptions(chunks=None if config.loss_chunks == AUTO else int(config.loss_chunks))


def values_to_save(captured: CapturedGraph, config: EngineConfig, policy: str | CheckpointFunction) -> frozenset[str]:
    """The names of calls whose results are saved, but those that are computed in chunks beside their gradients.

    Raises:
        ConfigError: ``policy`` is a function that gives something else than a wish.
    """
    saved = saved_values(captured, config.reshard_after_forward, policy)
    if "chunk_loss_head" in config.disabled_passes:
        return saved
    return saved - calls_in_chunks(captured.graph_module.graph, captured.inputs, chunk_options(config))
