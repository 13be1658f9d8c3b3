"""Small modules of several kinds, as configs of ``bench``: what a CPU trains in a few seconds, with its own data."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from tests.support.plans import rules_of

_STEPS = 200
_DEBUG = Path(__file__).parents[2] / "recipes/llama3/debug.yaml"


class _Trained(LightningModule):
    """AdamW, and batches of random numbers: as many on each rank, the same for every contender."""

    network: nn.Module
    rows = 32

    def sample(self, generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        """Inputs and classes."""
        raise NotImplementedError

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The mean cross entropy over all that is classified."""
        inputs, classes = batch
        return F.cross_entropy(self.network(inputs).flatten(0, -2), classes.flatten())

    def train_dataloader(self) -> DataLoader[Any]:
        """As many steps as any measurement takes."""
        drawn = self.sample(torch.Generator().manual_seed(0), 16 * self.rows)
        return DataLoader(TensorDataset(*drawn), batch_size=self.rows, drop_last=True)

    def configure_optimizers(self) -> Optimizer:
        """AdamW over everything."""
        return AdamW(self.parameters(), lr=1e-3)


class WideMLP(_Trained):
    """Linear layers with more parameters than rows: communication counts."""

    rows = 128

    def __init__(self, width: int = 768, depth: int = 3) -> None:
        super().__init__()
        block = (nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        blocks = [copy.deepcopy(nn.Sequential(*block)) for _ in range(depth)]
        self.width, self.network = width, nn.Sequential(*blocks, nn.LayerNorm(width), nn.Linear(width, 100))

    def sample(self, generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        return torch.randn(rows, self.width, generator=generator), torch.randint(100, (rows,), generator=generator)


class DroppingMLP(WideMLP):
    """The same with dropout: each rank draws the masks of its own rows."""

    def __init__(self, width: int = 768, depth: int = 3) -> None:
        super().__init__(width, depth)
        for block in self.network[:depth]:
            block.append(nn.Dropout(0.1))


class _Residual(nn.Module):
    def __init__(self, channels: int, wider: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, wider, 3, stride=wider // channels, padding=1, bias=False),
            nn.BatchNorm2d(wider),
            nn.ReLU(),
            nn.Conv2d(wider, wider, 3, padding=1, bias=False),
            nn.BatchNorm2d(wider),
        )
        self.around = nn.Identity() if wider == channels else nn.Conv2d(channels, wider, 1, stride=2, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.convolutions(images) + self.around(images))


class ResNet(_Trained):
    """Residual convolutions with BatchNorm over 32 x 32 pixels, as for CIFAR-10."""

    rows = 32

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        widths = [channels, channels, 2 * channels, 2 * channels, 4 * channels, 4 * channels]
        blocks = [_Residual(before, after) for before, after in itertools.pairwise(widths)]
        stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
        self.network = nn.Sequential(stem, *blocks, *head)

    def sample(self, generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(rows, 3, 32, 32, generator=generator)
        return images, torch.randint(10, (rows,), generator=generator)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        normed = self.before_attention(tokens)
        query, key, value = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2)
        tokens = tokens + self.out(attended)
        return tokens + self.down(F.gelu(self.up(self.before_mlp(tokens))))


class Encoder(_Trained):
    """A transformer that sees all of its tokens, with LayerNorm, biases and GELU; it labels each token."""

    rows = 8

    def __init__(
        self, width: int = 256, heads: int = 4, depth: int = 3, length: int = 64, vocabulary: int = 1000
    ) -> None:
        super().__init__()
        self.length, self.vocabulary = length, vocabulary
        blocks = [_Block(width, heads) for _ in range(depth)]
        self.network = nn.Sequential(
            nn.Embedding(vocabulary, width), *blocks, nn.LayerNorm(width), nn.Linear(width, 50)
        )

    def sample(self, generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(self.vocabulary, (rows, self.length), generator=generator)
        return tokens, tokens % 50


_COLUMN, _ROW = {"tp": "S(0)"}, {"tp": "S(1)"}
_MLP_RULES = {f"network.*.0.{kind}": _COLUMN for kind in ("weight", "bias")} | {"network.[012].2.weight": _ROW}
_ENCODER_RULES = {
    **{f"*.{name}.{kind}": _COLUMN for name in ("query", "key", "value", "up") for kind in ("weight", "bias")},
    "*.out.weight": _ROW,
    "*.down.weight": _ROW,
}


def _debug() -> dict[str, Any]:
    sections = yaml.safe_load(_DEBUG.read_text())
    return {key: sections[key] for key in ("model", "data")} | {"rules": rules_of("llama3/debug")}


def _here(module: type[LightningModule], rules: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": {"class_path": f"{__name__}.{module.__name__}"}, "rules": rules}


_WORKLOADS = {
    "llama3/debug": _debug,
    "wide MLP": _here(WideMLP, _MLP_RULES),
    "dropping MLP": _here(DroppingMLP, _MLP_RULES),
    "ResNet": _here(ResNet, {}),
    "encoder": _here(Encoder, _ENCODER_RULES),
}
NAMES = tuple(_WORKLOADS)
_MESHES: dict[str, dict[str, int]] = {
    "ddp": {"dp_replicate": -1},
    "fsdp": {"dp_shard": -1},
    "tp": {"tp": -1},
    "auto": {"dp_shard": -1},
}
PLANS = tuple(_MESHES)


def config(name: str, plan: str, hardware: str) -> dict[str, Any]:
    """The sections that a rank of ``bench`` reads.

    Args:
        name: one of ``NAMES``.
        plan: one of ``PLANS``; ``tp`` cuts by rules, where the workload has any.
        hardware: a file of rates.
    """
    sections = _WORKLOADS[name]()
    rules = sections.pop("rules")
    if "max_steps" in sections["model"].get("init_args", {}):
        sections["model"]["init_args"]["max_steps"] = _STEPS
    return {
        "seed_everything": 42,
        "trainer": {"accelerator": "cpu", "max_epochs": -1, "max_steps": _STEPS},
        "strategy": {
            "mesh": _MESHES[plan],
            "plan": {"base": "fsdp", "rules": rules} if plan == "tp" else plan,
            "compile": True,
            "process_group_backend": "gloo",
            "hardware": hardware,
        },
        **sections,
    }
