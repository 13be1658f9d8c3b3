"""LLaMAs of transformers with random weights on the disk, and modules that start from them."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_autoparallel import load_weights
from lightning_autoparallel.errors import AutoParallelError
from lightning_autoparallel.models import Llama3Module
from lightning_autoparallel.models.llama3_config import llama3_config
from lightning_autoparallel.models.llama3_hugging_face import ROTATED, hugging_face_names, in_halves
from lightning_autoparallel.strategy import strategy as strategies
from tests.conformance.saved import MESHES
from tests.distributed.jobs import Losses, make_strategy, make_trainer
from tests.numerics.training import full, local_rows

STEPS = 3
ROWS = 8
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": SCALED,
}
# the same network in Llama3Module's words
OVERRIDES: dict[str, Any] = {
    "dim": 32,
    "vocab_size": 64,
    "ffn_dim_multiplier": 48.5 / 85,
    "multiple_of": 1,
    "rope_theta": 10000.0,
    "rope_scaling": True,
    "rope_original_seq_len": 16,
    "max_seq_len": 64,
}
COLUMNS, ROWS_OF = {"tp": "S(0)"}, {"tp": "S(1)"}
OUR_RULES = {
    **{f"*.attention.w{name}.weight": COLUMNS for name in "qkv"},
    "*.attention.wo.weight": ROWS_OF,
    **{f"*.feed_forward.w{name}.weight": COLUMNS for name in "13"},
    "*.feed_forward.w2.weight": ROWS_OF,
}
THEIR_RULES = {
    **{f"*.{name}_proj.weight": COLUMNS for name in ("q", "k", "v", "gate", "up")},
    **{f"*.{name}_proj.weight": ROWS_OF for name in ("o", "down")},
}


def llama(tied: bool = False, **sizes: Any) -> Any:
    """A LlamaForCausalLM with random weights, norms too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **sizes}, tie_word_embeddings=tied))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, mean=1.0, std=0.2)
    return model


def saved_llama(folder: Path, tied: bool = False, max_shard_size: str = "10KB") -> str:
    """Where a ``llama`` lies in several files with an index."""
    llama(tied).save_pretrained(folder, max_shard_size=max_shard_size)
    return str(folder)


def changed(folder: str, to: Path, **config: Any) -> str:
    """A copy of a folder whose config.json says something else; None takes a key away."""
    for file in Path(folder).iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    found = {**json.loads((to / "config.json").read_text()), **config}
    (to / "config.json").write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
    return str(to)


class Sgd(LightningModule):
    """Plain SGD on the global batches of `batches`."""

    def batches(self) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(3)
        tokens = [torch.randint(0, 64, (ROWS, 25), generator=generator) for _ in range(STEPS)]
        return [{"inputs": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()} for rows in tokens]

    def loader(self, rank: int, shards: int) -> DataLoader:
        return DataLoader([local_rows(batch, rank, shards) for batch in self.batches()], batch_size=None)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


class Ours(Sgd, Llama3Module):
    """Llama3Module from files."""

    def __init__(self, weights: str | None, tied: bool = False) -> None:
        Llama3Module.__init__(self, "debug", {**OVERRIDES, "tie_embeddings": tied}, weights=weights)


class Theirs(Sgd):
    """LlamaForCausalLM, built on meta and from files, or as transformers itself reads them."""

    def __init__(self, weights: str, tied: bool = False, by_transformers: bool = False, **options: Any) -> None:
        super().__init__()
        self.weights, self.by_transformers, self.options = weights, by_transformers, options
        self.net: nn.Module | None = None

    def configure_model(self):
        from transformers import AutoConfig, AutoModelForCausalLM

        if self.net is not None:
            return
        if self.by_transformers:
            self.net = AutoModelForCausalLM.from_pretrained(self.weights).train()
            return
        with torch.device("meta"):
            self.net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.weights)).train()
        load_weights(self, self.weights, into="net", **self.options)

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)

    def training_step(self, batch, batch_idx):
        assert self.net is not None
        logits = self.net(input_ids=batch["inputs"], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


@dataclass(frozen=True, kw_only=True)
class Started:
    """What came of a training: losses, whole weights at its end, and the largest tensor that was made to begin it."""

    losses: list[float]
    ended: dict[str, Tensor]
    buffers: dict[str, Tensor]
    largest: int
    error: str = ""


class _Largest(TorchDispatchMode):
    """The most elements of a tensor of floats that was made inside; views of what is mapped from disk are not."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not isinstance(result, FakeTensor | DTensor) and not result.is_meta:
            held = {arg.untyped_storage().data_ptr() for arg in args if type(arg) is Tensor and not arg.is_meta}
            if result.is_floating_point() and result.untyped_storage().data_ptr() not in held:
                self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return result


@contextlib.contextmanager
def measured() -> Iterator[_Largest]:
    """Look at what sharding and loading allocate."""
    mode, original = _Largest(), strategies.shard_and_load

    def watched(*args: Any) -> None:
        with mode:
            original(*args)

    with mock.patch.object(strategies, "shard_and_load", watched):
        yield mode


def run(
    kind: type[Sgd],
    mesh: str | None,
    weights: str | None,
    plan: str = "fsdp",
    fits: int = 1,
    ckpt_path: str | None = None,
    precision: Any = None,
    **options: Any,
) -> Started:
    """Train a `kind` from files on a mesh of MESHES, or on one device without us where `mesh` is None.

    With no `fits` it is validated on nothing: set up, and given back.
    """
    module, losses = kind(weights, **options), Losses()
    rules = {"base": "fsdp", "rules": OUR_RULES if kind is Ours else THEIR_RULES}
    settings = {"plan": rules if plan == "rules" else plan}
    world = 1 if mesh is None else dist.get_world_size()

    def trainer(**options: Any) -> Any:
        strategy = None if mesh is None else make_strategy(MESHES[mesh], settings)
        return make_trainer(strategy, world, limit_val_batches=0, **options)

    def loader() -> DataLoader:
        if mesh is None:
            return module.loader(0, 1)
        own: Any = module.trainer.strategy
        return module.loader(own.mesh.data_parallel_rank, own.mesh.data_parallel_size)

    module.train_dataloader = module.val_dataloader = loader
    with warnings.catch_warnings(), measured() as mode:
        warnings.simplefilter("ignore")
        try:
            if not fits:
                trainer(precision=precision).validate(module, verbose=False, ckpt_path=ckpt_path)
            for _ in range(fits):
                trainer(callbacks=[losses]).fit(module)
        except AutoParallelError as error:
            return Started(losses=[], ended={}, buffers={}, largest=0, error=f"{type(error).__name__}: {error}")
    return Started(
        losses=losses.values,
        ended={name: full(parameter).detach().clone() for name, parameter in module.named_parameters()},
        buffers={name: buffer.clone() for name, buffer in module.named_buffers()},
        largest=mode.elements,
    )


def weights_of(started: Started, kind: type[Sgd]) -> dict[str, Tensor]:
    """Weights at the end of a training, by transformers' names."""
    if kind is not Ours:
        return {name.removeprefix("net."): value for name, value in started.ended.items()}
    tied = "model.output.weight" not in started.ended
    names = hugging_face_names(llama3_config("debug", {**OVERRIDES, "tie_embeddings": tied}))
    ended = {ours: started.ended[f"model.{ours}"] for ours in names}
    return {names[ours]: in_halves(t, 8) if ours.endswith(ROTATED) else t for ours, t in ended.items()}
