"""What a case is: a small LightningModule whose step's Python reads, writes, draws or decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

STEP = ("step",)
FORWARD = ("forward",)
EITHER = ("step", "forward")


class Case(LightningModule):
    """A classifier on the global batches of `batches`; subclasses say what their step does besides.

    A training must equal the oracle that its reported mode promises: in "step" one device that sees the global batch,
    in "forward" Lightning's DDPStrategy on as many ranks.

    Attributes:
        modes: which modes the training step may report.
        oracle: "mode", or "ddp" where one device cannot say: ranks differ on purpose.
        refusal: a text; where set, an error of the package with it, before the first step, is right too.
        captures: at most so many captures of the training step.
        keeps: attributes (dotted) that are compared after each step.
        validates: validates at the end of each epoch; predicts: predicts once after training.
        uncompared: names of logged values and attributes that `check` judges instead.
        tolerance: relative, of everything compared; None for the runner's.
        rows_elsewhere: predictions may be this rank's part by another dim, which only DDP shows.
        quick: in the default tier on one rank; pair: on two ranks, too.
        alone: on one rank only, because DDP says nothing of two.
        leaves_unused: whether DDP looks for parameters that a step leaves out.
        skips: results of None may come out as a loss, because Lightning takes no None on several ranks.
        remembers: keeps means over steps, which are nobody's where steps of two modes follow each other.
        names_line: a step that leaves the whole one has a line to be named for it.
        prints: compare what was printed; warns: a text, compare how many warnings have it.
    """

    modes: ClassVar[tuple[str, ...]] = EITHER
    oracle: ClassVar[str] = "mode"
    refusal: ClassVar[str | None] = None
    captures: ClassVar[int | None] = None
    keeps: ClassVar[tuple[str, ...]] = ()
    uncompared: ClassVar[tuple[str, ...]] = ()
    validates = False
    predicts = False
    rows_elsewhere = False
    tolerance: ClassVar[float | None] = None
    quick = pair = False
    alone = False
    prints = skips = remembers = False
    leaves_unused = names_line = True
    warns: ClassVar[str | None] = None
    epochs = 2
    steps = 3
    rows = 8
    trainer_options: ClassVar[Mapping[str, Any]] = {}
    strategy_options: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def reset(cls) -> None:
        """Puts state outside of instances back: runs of one process share it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    # -- data --------------------------------------------------------------------------------------------------------

    def batches(self) -> list[Any]:
        """The global batches of one epoch."""
        return [self.collate(x, y, i) for i, (x, y) in enumerate(self.pairs(self.steps, seed=1))]

    def validation_batches(self) -> list[Any]:
        return [self.collate(x, y, i) for i, (x, y) in enumerate(self.pairs(2, seed=2))]

    def pairs(self, steps: int, seed: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        return [
            (torch.randn(self.rows, 4, generator=generator), torch.randint(0, 3, (self.rows,), generator=generator))
            for _ in range(steps)
        ]

    def collate(self, x: Tensor, y: Tensor, index: int) -> Any:
        """One global batch."""
        return x, y

    def local(self, batch: Any, rank: int, shards: int) -> Any:
        """One rank's rows of a global batch."""
        return local_part(batch, rank, shards, self.rows)

    def loader(self, batches: list[Any], rank: int, shards: int) -> Any:
        """What one rank reads: whole batches, made anew whenever they are read."""
        return DataLoader(Copies([self.local(batch, rank, shards) for batch in batches]), batch_size=None)

    # -- steps -------------------------------------------------------------------------------------------------------

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.2)

    # -- what the runner asks ----------------------------------------------------------------------------------------

    def arguments(self) -> dict[str, Any]:
        """Arguments of the Trainer; override it for those that belong to one run."""
        return dict(self.trainer_options)

    def callbacks(self) -> list[Callback]:
        """Callbacks for the Trainer; a LightningModule's hook `configure_callbacks` may replace the Trainer's own."""
        return []

    @classmethod
    def check(cls, outcome: Any) -> None:
        """Asserts what no oracle can say, on each rank's outcome."""


class Copies(Dataset):
    """Batches that are copied when they are read, so that a change in place does not outlive its step."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return deepcopy(self.batches[index])


class On(Callback):
    """Runs functions of (trainer, module, batch index or 0) at hooks, by name: `On(train_batch_start=...)`."""

    def __init__(self, **functions: Callable[..., None]) -> None:
        for name, function in functions.items():
            setattr(self, f"on_{name}", self._hook(function))

    @staticmethod
    def _hook(function: Callable[..., None]) -> Callable[..., None]:
        def hook(trainer, module, *rest, **named):
            index = named.get("batch_idx", next((item for item in reversed(rest) if isinstance(item, int)), 0))
            function(trainer, module, index)

        return hook


def local_part(value: Any, rank: int, shards: int, rows: int) -> Any:
    """The rank's rows of tensors and lists as long as the batch, inside of plain containers."""
    if isinstance(value, Tensor):
        return value.chunk(shards)[rank].clone() if value.dim() and len(value) == rows else value.clone()
    if isinstance(value, list) and len(value) == rows:
        size = rows // shards
        return value[rank * size : (rank + 1) * size]
    if isinstance(value, dict):
        return type(value)((name, local_part(item, rank, shards, rows)) for name, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(local_part(item, rank, shards, rows) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(local_part(item, rank, shards, rows) for item in value)
    return value
