"""Settings that cannot work are refused when the Trainer is made, with the remedy."""

from __future__ import annotations

import os
import re
import sys
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import nn

from lightning_autoparallel import AutoParallelStrategy
from lightning_autoparallel.contracts import NodeInfo
from lightning_autoparallel.errors import ConfigError
from tests.distributed.jobs import Net, failure, make_strategy, make_trainer, train
from tests.support.worlds import Worlds


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            {"dp_shard": 2, "tp": 2},
            "mesh {dp_shard: 2, tp: 2} needs 4 processes, Trainer started 2: set devices=4 or dp_shard=-1",
        ),
        ({"dp_shard": -1, "dp_replicate": 4}, "2 processes do not divide by 4; start a multiple of 4 processes"),
        ({"dp_shard": -1, "tp": -1}, "has more than one -1: only one axis can be inferred from the world size"),
        ({"dp_shart": 2}, "unknown mesh axis 'dp_shart': did you mean 'dp_shard'?"),
        ({"dp_shard": 0}, "mesh axis 'dp_shard' has size 0: give a positive number of processes, or -1"),
        ({"dp_shard": 1, "cp": 2}, "mesh axis 'cp' is reserved: context parallelism is not built yet"),
        ({}, "mesh {} has no axis: name at least one, for example {dp_shard: -1}"),
    ],
    ids=str,
)
def test_mesh(mesh, message) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_trainer(make_strategy(mesh, {}), 2)


def test_an_unknown_plan_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError,
        match=re.escape(
            "unknown plan 'fdsp': plans are 'ddp', 'fsdp', 'hsdp', 'auto', or a mapping of rules; did you mean 'fsdp'?"
        ),
    ):
        AutoParallelStrategy(plan="fdsp")


class OwnPrecision(Precision):
    """What a user may have written."""


class OwnMixedPrecision(MixedPrecision):
    """Changed in some way."""


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"plugins": [OwnMixedPrecision("16-mixed", "cpu")]}, "'16-mixed' (OwnMixedPrecision)"),
        ({"plugins": [OwnPrecision()]}, "'32-true' (OwnPrecision)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_precisions_are_refused(options, named) -> None:
    message = (
        f"precision {named} is not supported by AutoParallelStrategy: use Trainer(precision=...) with one of "
        "'64-true', '32-true', '16-true', 'bf16-true', '16-mixed', 'bf16-mixed'"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_trainer(make_strategy({"dp_shard": -1}, {}), 1, **options)


def test_an_interactive_python_cannot_start_processes(monkeypatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(ConfigError, match=r"write the code to a file and run it, or set devices=1"):
        make_trainer(make_strategy({"dp_shard": 2}, {}), 2)


class ManualOptimization(Net):
    strategy: ClassVar = {"capture": "step"}

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class WithoutReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x * self.scale


class Sharded(Net):
    strategy: ClassVar = {"plan": "fsdp"}


class OnMeta(Net):
    def configure_model(self):
        with torch.device("meta"):
            self.net.insert(0, WithoutReset())


class Scripted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[1] = torch.jit.trace(nn.Linear(10, 10), torch.ones(2, 10))


@pytest.mark.parametrize(
    ("kind", "mesh", "message"),
    [
        (
            Scripted,
            {"dp_shard": 2},
            "ConfigError: Scripted.net.1 is a module of TorchScript, whose code and parameters",
        ),
        (
            ManualOptimization,
            {"dp_shard": 2},
            f"ConfigError: jobs.py:{Net.training_step.__code__.co_firstlineno}: ManualOptimization sets "
            "automatic_optimization=False: a step that optimizes by itself cannot be captured whole; use "
            'capture="auto" or "forward", or return the loss from training_step',
        ),
        (
            OnMeta,
            {"dp_shard": 2},
            "ConfigError: module 'net.0' (WithoutReset) is on the meta device and has no reset_parameters(): its "
            "parameters cannot be initialised; add that method, or build the module on a real device",
        ),
        (Sharded, {"dp_shard": 1, "tp": 2}, "plan 'fsdp' leaves mesh axis 'tp' of size 2 idle: it would compute"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_rank_refuses(kind, mesh, message, worlds: Worlds) -> None:
    for text, _ in worlds(2).run(failure, kind, mesh):
        assert message in text


class Compiled(Net):
    strategy: ClassVar = {"compile": True}


def failure_of_settings(name: str, values: list[Any], plan: str = "auto") -> tuple[str, float]:
    """What a rank is told whose setting is its own of ``values``."""
    own = type("Own", (Net,), {"strategy": {"plan": plan, name: values[dist.get_rank()]}})
    return failure(own)


OWN_SETTINGS: list[tuple[str, str, list[Any], str]] = [
    ("auto", "disabled_passes", [[], ["fuse_chained_all_gathers"]], "the passes"),
    ("auto", "bucket_mb", [None, 5.0], "the passes"),
    ("auto", "hardware", [None, "h100"], "a plan is found"),
    ("auto", "memory_budget_gib", [None, 1.0], "a plan is found"),
    ("auto", "activation_checkpointing", ["none", "full"], "a plan is found"),
    ("fsdp", "disabled_passes", [[], ["fuse_chained_all_gathers"]], "the passes"),
    ("fsdp", "bucket_mb", [None, 5.0], "the passes"),
    ("fsdp", "hardware", [None, "h100"], "the passes"),
    ("auto", "plan", ["auto", "fsdp"], "parameters are placed"),
    ("fsdp", "plan", ["ddp", "auto"], "parameters are placed"),
    ("auto", "plan", ["auto", {"net.0.weight": {"tp": "S(0)"}}], "parameters are placed"),
]


@pytest.mark.parametrize(("plan", "name", "values", "before"), OWN_SETTINGS)
def test_settings_of_a_rank_alone_are_named_before_passes_can_wait_for_each_other(
    plan: str, name: str, values: list[Any], before: str, worlds: Worlds
) -> None:
    for text, seconds in worlds(2).run(failure_of_settings, name, values, plan):
        assert text.startswith(f"PassError: before {before} rank 1 differs at the setting ")
        assert name in text.partition(" from rank 0")[0]
        assert seconds < 60


def wish_of_rank_0(node: NodeInfo) -> str:
    """Rank 1 has no answer."""
    return "save" if dist.get_rank() == 0 else "perhaps"


def test_a_checkpoint_function_that_fails_on_one_rank_stops_all(worlds: Worlds) -> None:
    values = [wish_of_rank_0] * 2
    (first, _), (second, _) = worlds(2).run(failure_of_settings, "activation_checkpointing", values)
    assert first.startswith("ConfigError: rank 1 stopped: activation_checkpointing: the function gave 'perhaps'")
    assert second.startswith("ConfigError: activation_checkpointing: the function gave 'perhaps'")


def failure_without_a_compiler(kind: type[Net]) -> tuple[str, float]:
    with mock.patch.dict(os.environ, {"PATH": "/nonexistent", "CXX": ""}):
        return failure(kind)


def test_inductor_without_a_compiler(worlds: Worlds) -> None:
    for text, _ in worlds(2).run(failure_without_a_compiler, Compiled):
        assert text.startswith("ConfigError: compile=True needs a C++ compiler for CPU code and none is on the PATH")
        assert "or set compile=False to interpret the graphs" in text
    for text, _ in worlds(2).run(failure_without_a_compiler, Net):
        assert text == "no error"


def test_the_settings_that_are_right(worlds: Worlds) -> None:
    assert len(worlds(2).run(train, Net, {"dp_shard": -1})[0].losses) == Net.steps
