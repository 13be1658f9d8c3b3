"""Collections of garbage are rarer while a plan is made, and as before behind it."""

from __future__ import annotations

import gc

import pytest

from lightning_autoparallel.cli.collecting import collected_rarely


def test_inside_collections_are_rare_and_what_is_there_is_not_looked_at() -> None:
    before = gc.get_threshold()
    with collected_rarely():
        assert gc.get_threshold() == (before[0] * 70, *before[1:])
        assert gc.get_freeze_count() > 1000
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_an_error_leaves_collections_as_they_were() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="no plan"), collected_rarely():
        raise ValueError("no plan")
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0
