"""What a step's Python reads, writes and draws is as right as its tensors: each case against one device and DDP.

A case passes if it equals the oracle that its reported mode promises. One that equals neither is silently wrong.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from lightning_autoparallel import AutoParallelStrategy
from tests.semantics.cases import all_cases
from tests.semantics.judge import judge
from tests.semantics.run import DDP, PLAIN, Outcome, run_rank, train
from tests.support.worlds import Worlds

CASES = all_cases()
SECONDS = 90  # of a case on all ranks: a hang would last until the collectives' timeout
HAS_MODES = "capture" in inspect.signature(AutoParallelStrategy).parameters

Oracle = Callable[[str], Any]


@pytest.fixture(scope="module")
def plain() -> Oracle:
    """One device's outcome of a case, trained once."""
    known: dict[str, Outcome] = {}

    def outcome(name: str) -> Outcome:
        if name not in known:
            known[name] = train(CASES[name], PLAIN)
        return known[name]

    return outcome


@pytest.fixture(scope="module")
def ddp(worlds: Worlds) -> Oracle:
    """The outcomes of two ranks under Lightning's DDPStrategy."""
    known: dict[str, list[Outcome]] = {}

    def outcomes(name: str) -> list[Outcome]:
        if name not in known:
            known[name] = [found[DDP] for found in worlds(2).run(run_rank, name, DDP, timeout_s=SECONDS)]
        return known[name]

    return outcomes


def cases(
    is_quick: Callable[[type], bool], of_each: int, is_meant: Callable[[type], bool] = lambda kind: True
) -> list[Any]:
    """The cases as parameters: the first quick ones ``of_each`` file in the default tier, the others in the matrix."""
    matrix = (pytest.mark.matrix, pytest.mark.semantics)
    taken: Counter[str] = Counter()
    found = []
    for name, kind in CASES.items():
        if is_meant(kind):
            file = name.partition(".")[0]
            is_default = is_quick(kind) and taken[file] < of_each
            taken[file] += is_default
            found.append(pytest.param(name, marks=(pytest.mark.semantics,) if is_default else matrix))
    return found


@pytest.mark.parametrize("name", cases(lambda kind: kind.quick, 2))
def test_one_rank(name: str, worlds: Worlds, plain: Oracle) -> None:
    expected = plain(name)
    found = [of_rank["auto"] for of_rank in worlds(1).run(run_rank, name, "auto", timeout_s=SECONDS)]
    judge(CASES[name], "auto", found, expected)


@pytest.mark.parametrize("name", cases(lambda kind: kind.pair, 1, lambda kind: not kind.alone))
def test_two_ranks(name: str, worlds: Worlds, plain: Oracle, ddp: Oracle) -> None:
    expected = plain(name)
    found = [of_rank["auto"] for of_rank in worlds(2).run(run_rank, name, "auto", timeout_s=SECONDS)]
    judge(CASES[name], "auto", found, expected, lambda: ddp(name))


@pytest.mark.skipif(not HAS_MODES, reason="the strategy has no argument `capture`")
@pytest.mark.parametrize("how", ["forward", "step"])
@pytest.mark.parametrize("name", cases(lambda kind: False, 0, lambda kind: not kind.alone))
def test_as_told(name: str, how: str, worlds: Worlds, plain: Oracle, ddp: Oracle) -> None:
    """Every case by each mode: "step" is right or refuses with a line, "forward" is as under DDP."""
    expected = plain(name)
    found = [of_rank[how] for of_rank in worlds(2).run(run_rank, name, how, timeout_s=SECONDS)]
    if not found[0].error and found[0].losses:
        assert found[0].modes["training_step"] == how
    judge(CASES[name], how, found, expected, lambda: ddp(name))
