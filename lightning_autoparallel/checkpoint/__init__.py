"""Checkpoints: folders with every rank's shards (``sharded.py``), and single files as one device has them."""

from lightning_autoparallel.checkpoint.background import BackgroundWriter, copied, copied_but
from lightning_autoparallel.checkpoint.consolidate import consolidate
from lightning_autoparallel.checkpoint.location import Location, put_back_in
from lightning_autoparallel.checkpoint.optimizers import optimizer_state
from lightning_autoparallel.checkpoint.safetensors_folder import CONFIG, SafetensorsFolder, write_safetensors
from lightning_autoparallel.checkpoint.sharded import (
    FOUND_PLAN,
    RANDOM_STATE,
    folder_of,
    load_sharded_model,
    load_sharded_optimizers,
    model_state,
    read_sharded_model,
    save_folder,
)
from lightning_autoparallel.checkpoint.shards_of_ranks import ShardsOfRanks
from lightning_autoparallel.checkpoint.single import (
    full_model_state,
    full_optimizer_state,
    load_full_model_state,
    load_full_optimizer_state,
    on_host,
)
from lightning_autoparallel.checkpoint.single_file import read_file, write_file
from lightning_autoparallel.checkpoint.size import FILE_LIMIT_BYTES, gathered_bytes, state_bytes
from lightning_autoparallel.checkpoint.stored import Part, StoredSpec, StoredTensors, fill_parts, own_checkpoint
from lightning_autoparallel.checkpoint.together import first_rank_runs
from lightning_autoparallel.checkpoint.weights import WeightsToCome, load_weights
from lightning_autoparallel.checkpoint.weights_only import save_weights

__all__ = [
    "CONFIG",
    "FILE_LIMIT_BYTES",
    "FOUND_PLAN",
    "RANDOM_STATE",
    "BackgroundWriter",
    "Location",
    "Part",
    "SafetensorsFolder",
    "ShardsOfRanks",
    "StoredSpec",
    "StoredTensors",
    "WeightsToCome",
    "consolidate",
    "copied",
    "copied_but",
    "fill_parts",
    "first_rank_runs",
    "folder_of",
    "full_model_state",
    "full_optimizer_state",
    "gathered_bytes",
    "load_full_model_state",
    "load_full_optimizer_state",
    "load_sharded_model",
    "load_sharded_optimizers",
    "load_weights",
    "model_state",
    "on_host",
    "optimizer_state",
    "own_checkpoint",
    "put_back_in",
    "read_file",
    "read_sharded_model",
    "save_folder",
    "save_weights",
    "state_bytes",
    "write_file",
    "write_safetensors",
]
