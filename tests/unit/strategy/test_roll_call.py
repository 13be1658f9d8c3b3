"""What a rank says of the one at fault, from what the store has told it."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_autoparallel.strategy.records import Answer, Failure
from lightning_autoparallel.strategy.roll_call import RollCall

WAITED = Failure(rank=0, text="OtherRankError", waited=True)


class Records:
    """Those of a store that ends."""

    def __init__(self, failures: list[Failure], ended: set[int]) -> None:
        self.is_lost, self._failures, self._ended = False, failures, ended

    def _asked(self, answer: object) -> object:
        if self.is_lost:
            raise dist.DistError("the store has ended")
        return answer

    def failures(self) -> object:
        return self._asked(self._failures)

    def ended(self) -> object:
        return self._asked(self._ended)

    def answers(self) -> object:
        return self._asked([Answer(rank=2, at="train.py:7 in hook", waits=False)])


def verdicts(failures: list[Failure], ended: set[int]) -> tuple[str | None, str | None]:
    """What rank 1 of three says before the store has ended, and after."""
    roll_call, records = RollCall(timedelta(seconds=1), lambda reason: None), Records(failures, ended)
    roll_call._rank, roll_call._records = 1, records  # type: ignore[assignment]
    with mock.patch.object(dist, "get_world_size", return_value=3):
        before = roll_call.verdict()
        records.is_lost = True
        return before, roll_call.verdict()


@pytest.mark.parametrize(("failures", "ended"), [([WAITED], set()), ([], {0})])
def test_what_ranks_have_said_is_known_when_the_store_has_ended(failures: list[Failure], ended: set[int]) -> None:
    before, after = verdicts(failures, ended)
    assert before == after
    assert after is not None and after.endswith("rank 2 has not come: it is at train.py:7 in hook")


def test_a_store_that_ends_without_a_word_means_rank_0() -> None:
    _, after = verdicts([], set())
    assert after is not None and after.startswith("rank 0 is gone without a word")
