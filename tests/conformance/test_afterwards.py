"""What a user has in hands after `fit`: the module and optimizers of one device."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_autoparallel.errors import CheckpointError
from tests.conformance.saved import MESHES, Run
from tests.distributed.jobs import Losses, Net, make_strategy, make_trainer
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance


class Kept(Run):
    """Its optimizer is made once, and its parameters carry what users hang on them."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.no_decay = True
        self.heard: list[int] = []
        self.net[0].weight.register_hook(lambda gradient: self.heard.append(1))
        self.optimizer: Any = None

    def configure_optimizers(self):
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02, eps=1e-4)
        return self.optimizer

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss((batch[0], batch[1])))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.net[1](self.net[0](x))
        return nn.functional.cross_entropy(self.uneven(torch.tanh(self.net[2](hidden))) * self.scale, y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


def twice(mesh: Mapping[str, int] | None, leave_sharded: bool = False) -> dict[str, Any]:
    """Fit, look, change a weight, validate, fit again with the same optimizer and Trainer's arguments."""
    torch.manual_seed(0)
    module, losses = Kept(), Losses()
    strategy = make_strategy(mesh, {"plan": "fsdp", "leave_sharded": leave_sharded}) if mesh else None
    shards = (lambda: (strategy.mesh.data_parallel_rank, strategy.mesh.data_parallel_size)) if strategy else None
    module.train_dataloader = module.val_dataloader = lambda: module.loader(*(shards() if shards else (0, 1)))
    ranks = dist.get_world_size() if mesh else 1
    seen: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(strategy, ranks, max_steps=3, max_epochs=-1, callbacks=[losses])
        trainer.fit(module)
        seen["types"] = {type(p) for p in module.parameters()} | {type(t) for t in module.state_dict().values()}
        state = trainer.optimizers[0].state_dict()["state"]
        seen["optimizer"] = {n: {k: v.clone() for k, v in own.items()} for n, own in state.items()}
        seen["bound"] = [
            p is q for p, q in zip(trainer.optimizers[0].param_groups[0]["params"], trained(module), strict=True)
        ]
        if leave_sharded:
            return seen
        with torch.no_grad():
            seen["output"] = module.net(torch.ones(2, 6))
        copied, file = copy.deepcopy(module), io.BytesIO()
        torch.save(module.net, file)
        seen["traces"] = b"lightning_autoparallel" in file.getvalue()
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        same = [torch.equal(a, b) for a, b in zip(copied.net.parameters(), loaded.parameters(), strict=True)]
        seen["copied"] = all(same)
        with torch.no_grad():
            module.net[0].weight.mul_(0.5)
        (validated,) = trainer.validate(module, verbose=False)
        trainer.fit_loop.epoch_loop.max_steps = 6
        trainer.fit(module)
    seen |= {"losses": losses.values, "validated": validated["val"], "heard": len(module.heard)}
    seen |= {"state": {name: value.clone() for name, value in module.state_dict().items()}}
    return seen | {"no_decay": module.net[0].weight.no_decay}


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("mesh", tiered(["1", "2", "2x2"], "2".__eq__))
def test_the_module_is_that_of_one_device(mesh: str, worlds: Worlds) -> None:
    expected, size = twice(None), {"1": 1, "2": 2, "2x2": 4}[mesh]
    for seen in worlds(size).run(twice, MESHES[mesh]):
        assert seen["types"] == expected["types"] == {nn.Parameter, Tensor}
        assert all(seen["bound"])
        assert (seen["copied"], seen["no_decay"], seen["heard"]) == (True, True, expected["heard"])
        assert not seen["traces"]
        for key in ("optimizer", "output", "losses", "validated", "state"):
            torch.testing.assert_close(seen[key], expected[key], rtol=1e-4, atol=1e-6)


class FailsOnce(Run):
    """Raises in its first training, on all ranks."""

    failed = False

    def on_train_batch_end(self, *args):
        if not self.failed:
            self.failed = True
            raise ValueError("once")


def after_a_failure() -> tuple[set[type], set[type]]:
    """The types of parameters after a training that failed, and after the next one with the same strategy."""
    module, strategy, found = FailsOnce(), make_strategy(MESHES["2"], {"plan": "fsdp"}), []
    module.train_dataloader = lambda: module.loader(strategy.mesh.data_parallel_rank, 2)
    trainer = make_trainer(strategy, 2, max_steps=2, max_epochs=-1)
    for _ in range(2):
        with contextlib.suppress(ValueError):
            trainer.fit(module)
        found.append({type(parameter.data) for parameter in module.parameters()})
    return found[0], found[1]


def test_a_failure_is_forgotten(worlds: Worlds) -> None:
    assert worlds(2).run(after_a_failure) == [({DTensor}, {Tensor})] * 2


def test_shards_stay_where_asked(worlds: Worlds) -> None:
    for seen in worlds(2).run(twice, MESHES["2"], True):
        assert DTensor in seen["types"]
        assert isinstance(seen["optimizer"][0]["exp_avg"], DTensor)


class OtherHead(Net):
    """Takes another head, and another scale, before its second fit: those of 32 bits, as layers are made."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x) * self.scale, y)

    def replace(self, head: bool) -> None:
        """The scale alone meets no layer that would refuse its dtype."""
        torch.manual_seed(7)
        self.scale = nn.Parameter(torch.tensor(0.7))
        if head:
            self.net[2] = nn.Linear(10, 5)


def fit_replaced(mesh: Mapping[str, int] | None, precision: Any, head: bool) -> dict[str, Tensor]:
    """The parameters after two fits of one Trainer, between which layers are replaced."""
    torch.manual_seed(0)
    module, strategy = OtherHead(), make_strategy(mesh, {"plan": "fsdp"}) if mesh else None
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if mesh else (0, 1)
    trainer = make_trainer(strategy, ranks, precision=precision)
    trainer.fit(module, module.loader(rank, ranks))
    module.replace(head)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, module.loader(rank, ranks))
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


REPLACED = [(precision, head) for precision in ("64-true", "bf16-true") for head in (True, False)]


@pytest.mark.parametrize(("precision", "head"), tiered(REPLACED, [REPLACED[0], REPLACED[3]].__contains__))
def test_layers_replaced_between_fits_have_the_precision_of_the_run(precision: str, head: bool, worlds: Worlds) -> None:
    expected = fit_replaced(None, precision, head)
    for parameters in worlds(2).run(fit_replaced, MESHES["2"], precision, head):
        tolerance = 1e-9 if precision == "64-true" else 2e-2  # the same dtypes, too
        torch.testing.assert_close(parameters, expected, rtol=tolerance, atol=tolerance)


class Best(Callback):
    """Keeps the weights of one epoch, as many write it."""

    def __init__(self, on_host: bool) -> None:
        self.on_host, self.state = on_host, {}

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            state = pl_module.state_dict()
            self.state = copy.deepcopy(state)
            if self.on_host:
                self.state = {name: value.detach().cpu().clone() for name, value in state.items()}


class LoadsAtEnd(Best):
    def on_fit_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.state)


def hooks_of(module: nn.Module) -> list[int]:
    return [len(part._load_state_dict_pre_hooks) for part in module.modules()]


def kept_best(mesh: Mapping[str, int] | None, options: Mapping[str, Any], how: str) -> dict[str, Any]:
    """Weights of the middle of a fit that are loaded when it is over, and what else happens to the module then."""
    torch.manual_seed(0)
    module, strategy = Kept(), make_strategy(mesh, options) if mesh else None
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if mesh else (0, 1)
    best = (LoadsAtEnd if how == "at end" else Best)(on_host=how == "on host")
    trainer = make_trainer(strategy, ranks, max_epochs=3, callbacks=[best])
    seen: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, module.loader(rank, ranks))
        if how == "in parts":
            parts = {name: {} for name, _ in module.named_children()}
            for name, value in best.state.items():
                part, _, rest = name.partition(".")
                parts.get(part, {})[rest] = value
            for name, values in parts.items():
                module.get_submodule(name).load_state_dict(values)
        elif how == "copied":
            copied = copy.deepcopy(module)
            copied.load_state_dict(best.state)
            module.load_state_dict(copied.state_dict())
        elif how != "at end":
            module.load_state_dict(best.state)
        seen["best"] = {name: value.clone() for name, value in module.state_dict().items()}
        before = hooks_of(module)
        trainer.fit_loop.max_epochs = 5
        trainer.fit(module, module.loader(rank, ranks))
        seen["again"] = {name: value.clone() for name, value in module.state_dict().items()}
    assert hooks_of(module) == before
    torch.save(module.net, file := io.BytesIO())
    seen["traces"] = b"lightning_autoparallel" in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded.load_state_dict({name: torch.zeros_like(value) for name, value in loaded.state_dict().items()})
    return seen | {"zeros": [float(p.abs().sum()) for p in loaded.parameters()]}


KEPT = [(how, plan) for plan in ("fsdp", "ddp", "auto") for how in ("after", "at end", "on host", "in parts", "copied")]


@pytest.mark.parametrize(("how", "plan"), tiered(KEPT, lambda case: case[1] == "fsdp" and case[0] != "at end"))
def test_weights_that_were_kept_in_shards_are_loaded_afterwards(how: str, plan: str, worlds: Worlds) -> None:
    expected = kept_best(None, {}, how)
    for seen in worlds(2).run(kept_best, MESHES["2"], {"plan": plan}, how):
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-6)


def loads_something_else() -> str:
    """The error of a rank that loads a part of what it kept, where the other loads all of it."""
    module, best = Kept(), Best(on_host=False)
    trainer = make_trainer(make_strategy(MESHES["2"], {"plan": "fsdp"}), 2, max_epochs=2, callbacks=[best])
    trainer.fit(module, module.loader(dist.get_rank(), 2))
    part = {name: value for name, value in best.state.items() if dist.get_rank() == 0 or "net.0" in name}
    with pytest.raises(CheckpointError) as caught:
        module.load_state_dict(part, strict=False)
    return str(caught.value)


def test_ranks_that_load_something_else_are_told(worlds: Worlds) -> None:
    for message in worlds(2).run(loads_something_else):
        assert "test_afterwards.py" in message
        assert "every rank must load them" in message


def copied_trainers(mesh: Mapping[str, int]) -> list[list[float]]:
    """The losses that the Trainer, a pickled one and a copied one see when each fits anew."""
    strategy = make_strategy(mesh, {"async_save": True})
    trainer = make_trainer(strategy, dist.get_world_size(), max_steps=2, max_epochs=-1, callbacks=[Losses()])
    seen = []
    for copied in (lambda: trainer, lambda: pickle.loads(pickle.dumps(trainer)), lambda: copy.deepcopy(trainer)):
        again = copied()
        torch.manual_seed(0)
        module = Run()
        again.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
        (heard,) = [callback for callback in again.callbacks if isinstance(callback, Losses)]
        seen.append(heard.values[-2:])
        again.fit_loop.epoch_loop.batch_progress.reset()
        again.fit_loop.epoch_loop.max_steps += 2
    return seen


def test_trainers_are_pickled_and_copied(worlds: Worlds) -> None:
    for first, pickled, copied in worlds(2).run(copied_trainers, MESHES["2"]):
        assert len(first) == 2
        assert first == pickled == copied
