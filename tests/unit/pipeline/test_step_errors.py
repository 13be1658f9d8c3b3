"""What is said of a step that raised, and of ranks that hold different batches."""

from __future__ import annotations

import pytest

from lightning_autoparallel.errors import RanksDifferError, StepFailedError
from lightning_autoparallel.pipeline.agreement import StepIdentity, differences_of_step
from lightning_autoparallel.pipeline.step_calls import errors_of_the_step


def test_what_the_step_raises_is_told_from_what_is_ours() -> None:
    with pytest.raises(StepFailedError, match="ValueError: of the user"), errors_of_the_step():
        raise ValueError("of the user")
    with pytest.raises(RanksDifferError, match="of ours"), errors_of_the_step():
        raise RanksDifferError("of ours")


def test_a_rank_that_is_gone_is_no_fault_of_the_step() -> None:
    lost = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer")
    with pytest.raises(RuntimeError, match="Connection closed") as raised, errors_of_the_step():
        raise lost
    assert raised.value is lost


def _step(batch: str, shape: tuple[int, ...]) -> StepIdentity:
    return StepIdentity(name="training_step", batch=batch, shapes={"x": shape}, values={}, variant=0, module_state="")


@pytest.mark.parametrize(
    ("other", "remedy"),
    [
        (_step("x: float64[4, 6]", (4, 6)), "give every rank the same kind of batch"),
        (_step("x: float32[3, 6]", (3, 6)), "same number of rows"),
        (_step("x: float32[4, 7]", (4, 7)), "pad to one length"),
    ],
)
def test_the_remedy_is_for_what_differs(other: StepIdentity, remedy: str) -> None:
    with pytest.raises(RanksDifferError, match=remedy):
        differences_of_step([_step("x: float32[4, 6]", (4, 6)), other])
