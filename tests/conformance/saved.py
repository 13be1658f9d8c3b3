"""A run that is saved, and goes on on another mesh, under another strategy or without one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from tests.distributed.jobs import Losses, Net, make_strategy, make_trainer
from tests.numerics.training import full
from tests.support.worlds import Worlds

HALF, ALL = 3, 8
FOLDER: dict[str, Any] = {"save_distributed_checkpoint": True}
RULES = {"net.0.weight": {"tp": "S(0)"}, "net.0.bias": {"tp": "S(0)"}, "net.2.weight": {"tp": "S(1)"}}
MESHES: dict[str, Mapping[str, int]] = {
    "1": {"dp_shard": 1},
    "2": {"dp_shard": 2},
    "4": {"dp_shard": 4},
    "2x2": {"dp_replicate": 2, "dp_shard": 2},
    "2xtp": {"dp_shard": 2, "tp": 2},
    "tp": {"tp": 2},
}


@dataclass(frozen=True)
class Place:
    """Where a run is: `mesh` is a key of MESHES, "plain" is one device without us, "ddp" Lightning's on two ranks."""

    mesh: str
    plan: str = "fsdp"

    def __str__(self) -> str:
        return self.mesh if self.mesh in ("plain", "ddp") else f"{self.mesh}-{self.plan}"

    @property
    def ranks(self) -> int:
        """Processes."""
        if self.mesh in ("plain", "ddp"):
            return 1 if self.mesh == "plain" else 2
        ranks = 1
        for size in MESHES[self.mesh].values():
            ranks *= size
        return ranks


class Run(Net):
    """Even and uneven shards, a tied and a frozen parameter, a buffer; two groups, a rate that moves, AdamW."""

    steps = 1

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7, bias=False))
        self.again = nn.Linear(8, 7, bias=False)
        self.again.weight = self.net[2].weight
        self.uneven = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.seen += 1
        x, y = batch
        hidden = self.net[1](self.net[0](x))
        scores = self.uneven(torch.tanh(self.net[2](hidden) + self.again(hidden)) * self.frozen)
        return nn.functional.cross_entropy(scores * self.scale, y)

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [{"params": trained[1:], "weight_decay": 0.1}, {"params": trained[:1], "lr": 0.01}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Restored(Callback):
    """Whole parameters and optimizer state when training begins."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_train_start(self, trainer, pl_module):
        self.state = state_of(trainer, pl_module)


def state_of(trainer: Any, module: nn.Module) -> dict[str, Any]:
    """Whole parameters, buffers and optimizer state, by name."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state = {name: full(tensor).clone() for name, tensor in tensors.items()}
    names = {parameter: name for name, parameter in module.named_parameters()}
    for optimizer in trainer.optimizers:
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                state[f"{names[parameter]}.{key}"] = full(value).clone() if isinstance(value, Tensor) else value
    return state


@dataclass(frozen=True, kw_only=True)
class Went:
    """What a run did: its losses, the state that it began and ended with, and its rates."""

    losses: list[float]
    began: dict[str, Any]
    ended: dict[str, Any]
    rates: list[float]
    step: int


def go(place: Place, steps: int, save_to: str | None, resume_from: str | None, **options: Any) -> Went:
    """Train to step `steps` at `place`, from a checkpoint or from the start."""
    torch.manual_seed(0)
    module, losses, restored = Run(), Losses(), Restored()
    if resume_from is not None:
        for parameter in module.parameters():
            nn.init.constant_(parameter, 0.3)  # what is not restored will show
    strategy: Any = None
    if place.mesh == "ddp":
        strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)
    elif place.mesh != "plain":
        plan = {"base": "fsdp", "rules": RULES} if place.plan == "rules" else place.plan
        strategy = make_strategy(MESHES[place.mesh], {"plan": plan, **options})
    trainer = make_trainer(strategy, place.ranks, max_steps=steps, max_epochs=-1, callbacks=[losses, restored])

    def loader() -> Any:
        if place.mesh == "ddp":
            return module.loader(trainer.global_rank, 2)
        if strategy is None:
            return module.loader(0, 1)
        return module.loader(strategy.mesh.data_parallel_rank, strategy.mesh.data_parallel_size)

    module.train_dataloader = loader
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, ckpt_path=resume_from)
        if save_to is not None:
            trainer.save_checkpoint(save_to)
    return Went(
        losses=losses.values,
        began=restored.state,
        ended=state_of(trainer, module),
        rates=trainer.lr_scheduler_configs[0].scheduler.get_last_lr(),
        step=trainer.global_step,
    )


def went(worlds: Worlds, place: Place, *args: Any, **options: Any) -> Went:
    """`go` where it belongs: in this process, or in a world, all of whose ranks must agree."""
    if place.mesh == "plain":
        return go(place, *args, **options)
    first, *others = worlds(place.ranks).run(_go, place, args, options)
    for other in others:
        torch.testing.assert_close(other.ended, first.ended, rtol=0, atol=0)
        assert place.mesh == "ddp" or other.losses == first.losses
    return first


def _go(place: Place, args: tuple[Any, ...], options: dict[str, Any]) -> Went:
    return go(place, *args, **options)


class SavesAt(Callback):
    """Saves before the steps that it is told."""

    def __init__(self, path: str, *steps: int) -> None:
        self.path, self.steps = path, steps

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.path.format(trainer.global_step))


def train(path: str, at: tuple[int, ...], options: dict[str, Any], mesh: Any = MESHES["2"]) -> tuple[list[float], Any]:
    """The losses and last state of a run that saves on its way."""
    torch.manual_seed(0)
    module, losses = Run(), Losses()
    strategy = make_strategy(mesh, options)
    trainer = make_trainer(
        strategy, dist.get_world_size(), max_steps=ALL, max_epochs=-1, callbacks=[losses, SavesAt(path, *at)]
    )
    module.train_dataloader = lambda: module.loader(strategy.mesh.data_parallel_rank, strategy.mesh.data_parallel_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module)
    return losses.values, state_of(trainer, module)
