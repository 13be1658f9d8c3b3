"""Twenty steps on a world of processes give the losses, metrics, parameters and buffers of one device."""

from __future__ import annotations

import itertools

import pytest

from tests.numerics.combinations import every, pairs
from tests.numerics.compare import TIMEOUT_S, case_of, check_case
from tests.numerics.models import MODELS
from tests.numerics.training import Case
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)

ONE, TWO, TWO_BY_TWO = (("dp_shard", 1),), (("dp_shard", 2),), (("dp_replicate", 2), ("dp_shard", 2))
SETTINGS = {"mesh": [TWO, TWO_BY_TWO], "plan": ["ddp", "fsdp"], "optimizer": ["adamw", "sgd"]}


def _interpreted() -> list[Case]:
    return [
        case_of(model, mesh=mesh, plan=plan, optimizer=optimizer)
        for model in MODELS
        for mesh in (ONE, TWO, TWO_BY_TWO)
        for plan in ("ddp", "fsdp")
        for optimizer in ("adamw", "sgd")
    ]


def _compiled() -> list[Case]:
    """In the default tier `tests/distributed/test_dropout.py` has compiled training, as compiling takes long."""
    adamw = [
        case_of(model, mesh=mesh, plan=plan, optimizer="adamw", compile=True)
        for model in MODELS
        for mesh in (ONE, TWO, TWO_BY_TWO)
        for plan in ("ddp", "fsdp")
    ]
    return [*adamw, case_of("convnet", mesh=TWO, plan="ddp", optimizer="sgd", compile=True)]


SLOW = {"transformer", "transformer32", "hf_llama", "hf_gpt2", "tied"}  # in the matrix only


def _covering() -> list[Case]:
    """Every model once and every pair of the other settings; `test_meshes.py` has every model on a mesh again."""
    cases = [case_of(model, **settings) for model, settings in zip(MODELS, itertools.cycle(every(SETTINGS)))]
    for model, plan in (("llama3", "fsdp"), ("convnet", "ddp")):
        cases.append(Case(model=model, mesh=ONE, plan=plan, optimizer="sgd"))
    cases.append(Case(model="tied", mesh=TWO, plan="fsdp", reshard_after_forward=False))
    cases.append(Case(model="llama3", mesh=TWO, plan="auto", reshard_after_forward=False))
    return cases


@pytest.mark.parametrize("case", tiered(_covering(), lambda case: case.model not in SLOW), ids=str)
def test_training_equals_one_device(case: Case, worlds: Worlds) -> None:
    check_case(case, worlds)


@pytest.mark.matrix
@pytest.mark.parametrize("case", [*_interpreted(), *_compiled()], ids=str)
def test_training_equals_one_device_everywhere(case: Case, worlds: Worlds) -> None:
    check_case(case, worlds)


def test_every_pair_of_settings_occurs() -> None:
    found = set().union(*(pairs({name: getattr(case, name) for name in SETTINGS}) for case in _covering()))
    for settings in every(SETTINGS):
        assert pairs(settings) <= found
