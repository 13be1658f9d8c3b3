"""Twenty steps on a world of processes give the losses, metrics, parameters and buffers of one device."""

from __future__ import annotations

import pytest

from tests.numerics.compare import case_of, check_case
from tests.numerics.models import MODELS
from tests.numerics.training import Case
from tests.worlds import Worlds

ONE, TWO, TWO_BY_TWO = (("dp_shard", 1),), (("dp_shard", 2),), (("dp_replicate", 2), ("dp_shard", 2))


def _interpreted() -> list[Case]:
    return [
        case_of(model, mesh=mesh, plan=plan, optimizer=optimizer)
        for model in MODELS
        for mesh in (ONE, TWO, TWO_BY_TWO)
        for plan in ("ddp", "fsdp")
        for optimizer in ("adamw", "sgd")
    ]


def _compiled() -> list[Case]:
    return [
        case_of(model, mesh=mesh, plan=plan, optimizer="adamw", compile=True)
        for model in MODELS
        for mesh in (ONE, TWO, TWO_BY_TWO)
        for plan in ("ddp", "fsdp")
    ]


def _covering() -> list[Case]:
    """Every pair of settings at least once, every model on two meshes and under both plans and optimizers."""
    cases = []
    for index, model in enumerate(MODELS):
        first, second = ("fsdp", "ddp") if index % 2 else ("ddp", "fsdp")
        cases.append(case_of(model, mesh=TWO, plan=first, optimizer="adamw"))
        cases.append(case_of(model, mesh=TWO_BY_TWO, plan=second, optimizer="sgd"))
    for model, plan in (("llama3", "fsdp"), ("convnet", "ddp")):
        cases.append(Case(model=model, mesh=ONE, plan=plan, optimizer="sgd"))
    # LLaMA-3 is compiled in test_meshes.py, fsdp in test_precision.py too.
    cases.append(Case(model="convnet", mesh=TWO, plan="ddp", compile=True, optimizer="sgd"))
    cases.append(Case(model="tied", mesh=TWO, plan="fsdp", reshard_after_forward=False))
    return cases


@pytest.mark.parametrize("case", _covering(), ids=str)
def test_training_equals_one_device(case: Case, worlds: Worlds) -> None:
    check_case(case, worlds)


@pytest.mark.matrix
@pytest.mark.parametrize("case", [*_interpreted(), *_compiled()], ids=str)
def test_training_equals_one_device_everywhere(case: Case, worlds: Worlds) -> None:
    check_case(case, worlds)
