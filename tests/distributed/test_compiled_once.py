"""One rank compiles what several need; where a compiler fails, the first or one that waited, no rank is left alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from lightning_autoparallel.pipeline import compiled_once, stages
from tests.distributed.jobs import Net, Outcome, train
from tests.support.worlds import Worlds

COMPILE = "lightning_autoparallel.compile.backend.compile_graph"


class Plain(Net):
    """The small classifier."""

    steps = 2


class Compiled(Plain):
    """It, compiled."""

    strategy: ClassVar[Mapping[str, Any]] = {"compile": True, "plan": "fsdp"}

    def extra(self) -> Any:
        return self.trainer.strategy.modes


def failing_on(rank: int, cache: str) -> tuple[Outcome, list[tuple[int, int]]]:
    """Train where the compiler of one rank fails; with the turn of each compilation, and how many turns it had."""
    turns = []

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no space left")

    def noted(*args: Any) -> tuple[int, int]:
        turns.append(compiled_once.compiling_turn(*args))
        return turns[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
        patched.setattr(stages, "compiling_turn", noted)
        if dist.get_rank() == rank:
            patched.setattr(COMPILE, fails)
        return train(Compiled, {"dp_shard": 2}), turns


@pytest.mark.parametrize("rank", [0, 1], ids=["the first", "one that waits"])
def test_a_rank_whose_compiler_fails(rank: int, worlds: Worlds, tmp_path: Path):
    results = worlds(2).run(failing_on, rank, str(tmp_path))
    assert [turns[0] for _, turns in results] == [(0, 2), (1, 2)]
    ours = [outcome for outcome, _ in results]
    said = [warning for outcome in ours for warning in outcome.warnings if "runs in forward mode" in warning]
    alone = train(Plain, None)
    for outcome in ours:
        assert outcome.extra == {"training_step": "forward"}
        assert "no space left" in str(said)
        torch.testing.assert_close(outcome.parameters, alone.parameters)


class Told:
    """A control group of ranks with given keys."""

    group = "another rank's too"

    def __init__(self, keys: list[Any]) -> None:
        self.keys = keys

    def gather(self, value: Any) -> list[Any]:
        return self.keys


@pytest.mark.parametrize(
    ("keys", "turns"),
    [
        (["a", "a", "a"], [(0, 2), (1, 2), (1, 2)]),
        (["a", "b", "a", "b"], [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (["a", "b"], [(0, 1), (0, 1)]),
        ([None, None], [(0, 1), (0, 1)]),
    ],
    ids=str,
)
def test_the_first_of_equal_ranks_goes_first(keys, turns, monkeypatch):
    monkeypatch.setattr(compiled_once, "_key", lambda partitioned: None)
    for rank, expected in enumerate(turns):
        monkeypatch.setattr(dist, "get_rank", lambda own=rank: own)
        assert compiled_once.compiling_turn(None, Told(keys)) == expected
