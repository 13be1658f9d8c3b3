"""Every pass switched off in turn, and all at once: twenty steps of LLaMA-3 in float32 against the graph without any.

The default tier trains one layer on four places, and switches passes off so that every two of them meet in every
way. The matrix switches off none, with buckets of both sizes, and each alone, with either size in turn, on
every place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from lightning_autoparallel.passes import all_passes
from tests.numerics.combinations import covering_switches
from tests.numerics.passes import STEPS, Judgement, Place, Switches, judge, store_chained_plan
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

JOB_TIMEOUT_S = 400
pytestmark = pytest.mark.timeout(1000)  # the first test at a place runs two or three jobs

NAMES = tuple(graph_pass.name for graph_pass in all_passes())
WITHOUT = Switches(off=NAMES)
# Every bucket holds what a link needs to be saturated, which is all there is here; or the limit cuts it into many.
LARGE, SMALL = None, 2e-3

FSDP = Place(mesh=(("dp_shard", 2),), plan="fsdp")
TP = Place(mesh=(("tp", 2),), plan="rules")
# Each pass has something to do here: weights wider than the arithmetic for cast_before_gather, and a backward that
# reads two of a layer whole for fuse_chained_all_gathers.
CHAINED = Place(mesh=(("dp_shard", 2), ("tp", 2)), plan="rules", wide=True, chained=True)
HSDP = Place(mesh=(("dp_replicate", 2), ("dp_shard", 2)), plan="hsdp")
PLACES = (FSDP, TP, CHAINED, HSDP)
DEEP = tuple(
    replace(place, layers=2)
    for place in (
        *PLACES,
        Place(mesh=CHAINED.mesh, plan="rules"),
    )
)

Judge = Callable[[Place, Switches], list[Judgement]]


@pytest.fixture(scope="module")
def judged(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    """What all ranks saw, trained once per place and switches."""
    done: dict[tuple[Place, Switches], list[Judgement]] = {}
    stored: dict[Place, str] = {}

    def run(place: Place, switches: Switches) -> list[Judgement]:
        if place.chained and place not in stored:
            folder = str(tmp_path_factory.mktemp("chained"))
            stored[place] = worlds(place.world_size).run(store_chained_plan, place, folder)[0]
        if (place, switches) not in done:
            job = judge, place, switches, stored.get(place)
            done[place, switches] = worlds(place.world_size).run(*job, timeout_s=JOB_TIMEOUT_S)
        return done[place, switches]

    return run


def _covering() -> Iterator[tuple[Place, Switches]]:
    """Two choices of passes at each place; with the graph without passes, every pair of settings."""
    for place, rows in zip(PLACES, covering_switches(len(NAMES), len(PLACES)), strict=True):
        for bits, bucket_mb in zip(rows, (LARGE, SMALL), strict=True):
            off = tuple(name for name, on in zip(NAMES, bits, strict=True) if not on)
            yield place, Switches(off=off, bucket_mb=bucket_mb)


def _everything() -> Iterator[tuple[Place, Switches]]:
    for start, place in enumerate(DEEP):
        yield from ((place, Switches(bucket_mb=bucket_mb)) for bucket_mb in (LARGE, SMALL))
        for turn, name in enumerate(NAMES, start):
            yield place, Switches(off=(name,), bucket_mb=(LARGE, SMALL)[turn % 2])
    yield FSDP, Switches(compile=True)
    yield TP, Switches(compile=True, bucket_mb=SMALL)


COVERING, EVERYTHING = list(_covering()), list(_everything())


def _check(judged: Judge, place: Place, switches: Switches) -> None:
    """Losses and weights of the graph without passes; launches of every step, and without gradients, as reported."""
    plain, ours = judged(place, replace(WITHOUT, compile=switches.compile)), judged(place, switches)
    assert plain[0].changed == frozenset()
    for rank in ours:
        assert rank.losses == ours[0].losses
        assert rank.measured == [rank.predicted] * STEPS
        assert rank.measured_inference == rank.predicted_inference
        assert not rank.changed & set(switches.off)
    first, expected = ours[0], plain[0]
    assert first.losses[0] == pytest.approx(expected.losses[0], rel=1e-6, abs=0)
    assert first.losses[STEPS - 1] == pytest.approx(expected.losses[STEPS - 1], rel=1e-5, abs=0)
    # Twenty steps of AdamW move a weight by up to 2e-2.
    torch.testing.assert_close(first.parameters, expected.parameters, rtol=0, atol=1e-5)


def _name(value: Place | Switches) -> str:
    if isinstance(value, Place):
        return str(value)
    passes = "without-" + "-".join(value.off) if value.off else "all"
    return passes + "-small" * (value.bucket_mb is not None) + "-compiled" * value.compile


@pytest.mark.parametrize(
    ("place", "switches"), tiered(COVERING, lambda case: case[0] in (FSDP, TP) and case[1].bucket_mb is None), ids=_name
)
def test_passes_change_no_numbers(place: Place, switches: Switches, judged: Judge):
    _check(judged, place, switches)


@pytest.mark.matrix
def test_every_pass_has_something_to_do(judged: Judge):
    """Where a pass changes nothing, switching it off shows nothing."""
    assert frozenset().union(*(judged(*case)[0].changed for case in COVERING)) == set(NAMES)


@pytest.mark.matrix
@pytest.mark.parametrize(("place", "switches"), EVERYTHING, ids=_name)
def test_passes_change_no_numbers_everywhere(place: Place, switches: Switches, judged: Judge):
    _check(judged, place, switches)
