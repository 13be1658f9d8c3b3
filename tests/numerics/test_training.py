"""Twenty steps on a world of processes give the losses, metrics, parameters and buffers of one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.numerics.models import MODELS
from tests.numerics.training import Case, Outcome, run_case, run_rank
from tests.worlds import Worlds

ONE, TWO, TWO_BY_TWO = (("dp_shard", 1),), (("dp_shard", 2),), (("dp_replicate", 2), ("dp_shard", 2))
LOSS_TOLERANCE = 1e-5  # relative
WEIGHT_TOLERANCE = {"adamw": 1e-4, "sgd": 1e-5}  # absolute


def _case(model: str, **settings: Any) -> Case:
    # A training that amplifies rounding is compared while one device agrees with itself: tests.numerics.sensitivity.
    return Case(model=model, steps=4 if model == "transformer32" else 20, **settings)


def _interpreted() -> list[Case]:
    return [
        _case(model, mesh=mesh, plan=plan, optimizer=optimizer)
        for model in MODELS
        for mesh in (ONE, TWO, TWO_BY_TWO)
        for plan in ("ddp", "fsdp")
        for optimizer in ("adamw", "sgd")
    ]


def _compiled() -> list[Case]:
    return [
        _case(model, mesh=mesh, plan=plan, optimizer="adamw", compile=True)
        for model in MODELS
        for mesh in (ONE, TWO, TWO_BY_TWO)
        for plan in ("ddp", "fsdp")
    ]


def _covering() -> list[Case]:
    """Every pair of settings at least once, every model on two meshes and under both plans and optimizers."""
    cases = []
    for index, model in enumerate(MODELS):
        first, second = ("fsdp", "ddp") if index % 2 else ("ddp", "fsdp")
        cases.append(_case(model, mesh=TWO, plan=first, optimizer="adamw"))
        cases.append(_case(model, mesh=TWO_BY_TWO, plan=second, optimizer="sgd"))
    for model, plan in (("llama3", "fsdp"), ("convnet", "ddp")):
        cases.append(Case(model=model, mesh=ONE, plan=plan, optimizer="sgd"))
    cases.append(Case(model="llama3", mesh=TWO, plan="fsdp", compile=True))
    cases.append(Case(model="convnet", mesh=TWO, plan="ddp", compile=True, optimizer="sgd"))
    cases.append(Case(model="tied", mesh=TWO, plan="fsdp", reshard_after_forward=False))
    return cases


@functools.lru_cache
def _oracle(model: str, optimizer: str, steps: int) -> Outcome:
    """The same module under a plain single-device Trainer on the same global batches."""
    return run_case(Case(model=model, mesh=ONE, optimizer=optimizer, steps=steps), None)


def _check(case: Case, worlds: Worlds) -> None:
    expected = _oracle(case.model, case.optimizer, case.steps)
    outcomes = worlds(case.world_size).run(run_rank, case, timeout_s=280)
    first = outcomes[0]
    assert len(first.losses) == case.steps
    torch.testing.assert_close(first.losses, expected.losses, rtol=LOSS_TOLERANCE, atol=0)
    assert first.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert first.metrics[name] == pytest.approx(value, rel=LOSS_TOLERANCE), name
    for kind in ("parameters", "buffers"):
        ours, theirs = getattr(first, kind), getattr(expected, kind)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=WEIGHT_TOLERANCE[case.optimizer], msg=name)
    for other in outcomes[1:]:
        assert other.metrics == first.metrics
        assert other.losses == first.losses
    for outcome in outcomes:
        assert outcome.measured == outcome.predicted


@pytest.mark.parametrize("case", _covering(), ids=str)
def test_training_equals_one_device(case: Case, worlds: Worlds) -> None:
    _check(case, worlds)


@pytest.mark.matrix
@pytest.mark.parametrize("case", [*_interpreted(), *_compiled()], ids=str)
def test_training_equals_one_device_everywhere(case: Case, worlds: Worlds) -> None:
    _check(case, worlds)
