"""Checkpoints: folders with every rank's shards (``sharded.py``), and single files as one device has them."""

from lightning_autoparallel.checkpoint.sharded import (
    RANDOM_STATE,
    is_sharded_checkpoint,
    load_sharded_checkpoint,
    model_state,
    optimizer_state,
    save_sharded_checkpoint,
)
from lightning_autoparallel.checkpoint.single import (
    full_model_state,
    full_optimizer_state,
    load_full_model_state,
    load_full_optimizer_state,
)

__all__ = [
    "RANDOM_STATE",
    "full_model_state",
    "full_optimizer_state",
    "is_sharded_checkpoint",
    "load_full_model_state",
    "load_full_optimizer_state",
    "load_sharded_checkpoint",
    "model_state",
    "optimizer_state",
    "save_sharded_checkpoint",
]
