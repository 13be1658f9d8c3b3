"""Saved anywhere, resumed anywhere: bit-equal state after loading, and the run of one that never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conformance.saved import ALL, HALF, Place, Went, go, went
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance

OURS = [
    Place("1"),
    Place("2", "ddp"),
    Place("2"),
    Place("4"),
    Place("2x2"),
    Place("2x2", "hsdp"),
    Place("2x2", "ddp"),
    Place("tp", "rules"),
    Place("2xtp", "rules"),
]
ELSEWHERE = [Place("plain"), Place("ddp")]
ALL_PAIRS = [(a, b, kind) for a in OURS for b in OURS for kind in ("file", "folder")]
WITH_OTHERS = [(a, b, "file") for a in OURS for b in ELSEWHERE] + [(a, b, "file") for a in ELSEWHERE for b in OURS]
QUICK = {
    (Place("2"), Place("4"), "folder"),
    (Place("2xtp", "rules"), Place("2"), "folder"),
    (Place("ddp"), Place("2"), "file"),
}


@pytest.fixture(scope="module")
def whole() -> Went:
    """The run that never stops, on one device without us."""
    return go(Place("plain"), ALL, None, None)


@pytest.fixture(scope="module")
def saved() -> dict[tuple[Place, str], tuple[str, Went]]:
    """Checkpoints by place and kind, written once."""
    return {}


@pytest.mark.parametrize(("before", "after", "kind"), tiered([*ALL_PAIRS, *WITH_OTHERS], QUICK.__contains__), ids=str)
def test_a_run_goes_on(before, after, kind, whole, saved, worlds: Worlds, tmp_path_factory) -> None:
    if (before, kind) not in saved:
        path = str(tmp_path_factory.mktemp("saved") / "run.ckpt")
        options = {"save_distributed_checkpoint": kind == "folder"}
        saved[before, kind] = path, went(worlds, before, HALF, path, None, **options)
    path, first = saved[before, kind]
    assert Path(path).is_dir() == (kind == "folder")
    second = went(worlds, after, ALL, None, path)
    torch.testing.assert_close(second.began, first.ended, rtol=0, atol=0)
    assert (first.step, second.step) == (HALF, ALL)
    assert second.rates == whole.rates != first.rates
    if Place("ddp") not in (before, after):  # whose losses are those of a rank's rows
        torch.testing.assert_close(first.losses + second.losses, whole.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(second.ended, whole.ended, rtol=0, atol=1e-5)
