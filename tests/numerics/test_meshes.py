"""Tensor parallelism, sharding and replication together train like one device, however the Trainer is set up."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.numerics.combinations import Settings, every, in_turn, pairs
from tests.numerics.compare import TIMEOUT_S, case_of, check_case
from tests.numerics.rules import RULES
from tests.numerics.training import Case
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)

# A plan without rules would leave tp idle, which is refused; rules may name tp only.
PLACES = [
    *every({"mesh": [(("tp", 2),)], "plan": ["rules", "hsdp_rules"]}),
    *every({"mesh": [(("dp_shard", 2),)], "plan": ["fsdp", "hsdp"]}),
    *every({"mesh": [(("dp_shard", 2), ("tp", 2))], "plan": ["rules", "hsdp_rules"]}),
    *every({"mesh": [(("dp_replicate", 2), ("dp_shard", 2))], "plan": ["fsdp", "hsdp"]}),
    *every({"mesh": [(("dp_replicate", 2), ("tp", 2))], "plan": ["rules", "hsdp_rules"]}),
]
CLIP = 0.1  # below the norm of the gradients of every model
OPTIONS = {
    "accumulate": [1, 4],
    "clip": [None, CLIP],
    "precision": ["32-true", "bf16-mixed"],
    "optimizer": ["adamw", "sgd"],
}
EIGHT = (("dp_replicate", 2), ("dp_shard", 2), ("tp", 2))


def _at(model: str, place: Settings) -> Settings:
    return {"model": model, **place}


def _covering() -> list[Settings]:
    """Every model once, some on the same mesh; every pair of the other settings."""
    turns = [*range(len(PLACES)), *range(4, 7)]
    return [
        {**_at(model, PLACES[turn]), **in_turn(OPTIONS, turn, start=number // len(PLACES))}
        for number, (model, turn) in enumerate(zip(RULES, turns, strict=True))
    ]


def _everywhere() -> list[Settings]:
    """LLaMA-3 with every combination; the other models on every mesh and plan, the other settings in turn."""
    rest = {name: values for name, values in OPTIONS.items() if name != "optimizer"}
    llama = [
        {**_at("llama3", place), **settings, "optimizer": OPTIONS["optimizer"][number.bit_count() % 2]}
        for place in PLACES
        for number, settings in enumerate(every(rest))
    ]
    others = [
        {**_at(model, place), **in_turn(OPTIONS, turn, start)}
        for start, model in enumerate(RULES)
        if model != "llama3"
        for turn, place in enumerate(PLACES)
    ]
    return [*llama, *others]


def _case(settings: Settings, **more: Any) -> Case:
    return case_of(**settings, **more)


def _steady(model: str) -> str:
    """AdamW amplifies rounding in transformer32 (`compare._weight_tolerance`): one weight of 8000 is off by 1.3e-4."""
    return "sgd" if model == "transformer32" else "adamw"


MESH = (("dp_shard", 2), ("tp", 2))
# What tp cuts between steps only: all models on one mesh, one of them on three axes.
STORED = [
    *(case_of(model, mesh=MESH, plan="stored", optimizer=_steady(model), clip=CLIP) for model in RULES),
    case_of("llama3", mesh=EIGHT, plan="stored", rows=4, precision="bf16-mixed"),
    case_of("llama3", mesh=MESH, plan="stored", accumulate=4, compile=True),
]


def _found(model: str, mesh: tuple[tuple[str, int], ...], steady: bool = False, **more: Any) -> Case:
    optimizer = "sgd" if steady else _steady(model)
    return case_of(model, mesh=mesh, plan="auto", optimizer=optimizer, **more)


# Plans that are found: all models on one axis, on two and on three.
FOUND = [
    *(_found(model, MESH, clip=CLIP) for model in RULES),
    *(_found(model, ((axis, 2),)) for model, axis in zip(RULES, itertools.cycle(("tp", "dp_shard")), strict=False)),
    _found("llama3", (("dp_shard", 2),)),
    _found("llama3", (("dp_replicate", 2), ("dp_shard", 2)), precision="bf16-mixed"),
    *(_found(model, EIGHT, rows=4, steady=model == "hf_llama") for model in RULES),
    _found("llama3", MESH, accumulate=4, compile=True),
]
# Heads in chunks: every language model, its vocabulary cut over tp, compiled, and on rows alone.
SPEAKING = ("llama3", "hf_llama", "hf_gpt2", "transformer", "tied", "ignore_index")
IN_CHUNKS = [
    *(case_of(model, mesh=MESH, plan="rules", compile=True, clip=CLIP, loss_chunks=2) for model in SPEAKING),
    *(case_of(model, mesh=(("dp_shard", 2),), plan="fsdp", loss_chunks=3) for model in SPEAKING),
    *(case_of(model, mesh=MESH, plan="rules", precision="bf16-mixed", loss_chunks=2) for model in SPEAKING),
    *(case_of(model, mesh=MESH, plan="auto", accumulate=4, loss_chunks=2) for model in SPEAKING[:2]),
]
COVERING = list(map(_case, _covering()))
SLOW = {"transformer", "transformer32", "hf_llama", "hf_gpt2", "attention", "tied"}  # in the matrix only
EVERYWHERE = [
    case_of("llama3", mesh=(("tp", 2),), plan="rules", compile=True),
    case_of("llama3", mesh=(("dp_shard", 2), ("tp", 2)), plan="rules", compile=True),
    *(case for case in map(_case, _everywhere()) if case not in COVERING),
    *STORED,
    *FOUND,
    case_of("llama3", mesh=EIGHT, plan="rules", rows=4),
    case_of("llama3", mesh=EIGHT, plan="hsdp_rules", rows=4, optimizer="sgd"),
]


@pytest.mark.parametrize("case", tiered(COVERING, lambda case: case.model not in SLOW), ids=str)
def test_training_equals_one_device(case: Case, worlds: Worlds) -> None:
    check_case(case, worlds)


@pytest.mark.matrix
@pytest.mark.parametrize("case", EVERYWHERE, ids=str)
def test_training_equals_one_device_everywhere(case: Case, worlds: Worlds) -> None:
    check_case(case, worlds)


@pytest.mark.parametrize("model", [None, *RULES], ids=str)
def test_every_pair_of_settings_occurs(model: str | None) -> None:
    """In the default tier over all models; in the matrix for each of them."""
    cases = _covering() if model is None else [case for case in _everywhere() if case["model"] == model]
    found = set().union(*map(pairs, cases))
    for place in PLACES:
        for settings in every(OPTIONS):
            assert pairs({**place, **settings}) <= found


@pytest.mark.matrix
@pytest.mark.parametrize("case", IN_CHUNKS, ids=str)
def test_heads_in_chunks_train_like_one_device(case: Case, worlds: Worlds) -> None:
    outcome = check_case(case, worlds)
    assert any(note.endswith(f"{case.loss_chunks} chunks of rows") for note in outcome.heads), outcome.heads
