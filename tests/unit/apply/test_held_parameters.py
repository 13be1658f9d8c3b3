"""Who holds a parameter whose place another took holds that one."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_autoparallel.apply.held_parameters import rebind_held
from lightning_autoparallel.apply.params import Replacements

Pair = namedtuple("Pair", ["one", "other"])


class Own:
    """A class as a user writes one."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


@pytest.fixture
def places() -> tuple[nn.Parameter, nn.Parameter, Replacements]:
    before, now, replacements = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1)), Replacements()
    replacements.note(before, now)
    return before, now, replacements


def test_an_attribute(places) -> None:
    before, now, replacements = places
    holder = Own(held=before, other=3)
    rebind_held([holder], replacements)
    assert holder.held is now and holder.other == 3


@pytest.mark.parametrize(
    ("hold", "first"),
    [
        (lambda p: [p, 1], lambda held: held[0]),
        (lambda p: deque([p, 1], maxlen=2), lambda held: held[0]),
        (lambda p: {"a": p}, lambda held: held["a"]),
        (lambda p: {p}, lambda held: next(iter(held))),
        (lambda p: OrderedDict([(p, 1), ("b", 2)]), lambda held: next(iter(held))),
        (lambda p: [[{"a": (p,)}]], lambda held: held[0][0]["a"][0]),
        (lambda p: SimpleNamespace(a=p), lambda held: held.a),
        (lambda p: Own(a=Own(b=[p])), lambda held: held.a.b[0]),
    ],
)
def test_what_can_be_changed_stays_the_same_object(hold, first, places) -> None:
    before, now, replacements = places
    held = hold(before)
    holder = Own(held=held)
    rebind_held([holder], replacements)
    assert holder.held is held and first(held) is now


@pytest.mark.parametrize("hold", [lambda p: (p, 1), lambda p: Pair(p, 1), lambda p: frozenset([p])])
def test_what_cannot_be_changed_is_made_anew(hold, places) -> None:
    before, now, replacements = places
    holder = Own(held=hold(before), other=(1, 2))
    other = holder.other
    rebind_held([holder], replacements)
    assert type(holder.held) is type(hold(before)) and next(iter(holder.held)) is now
    assert holder.other is other


def test_keys_keep_their_order(places) -> None:
    before, now, replacements = places
    holder = Own(held={"a": 1, before: 2, "c": before})
    rebind_held([holder], replacements)
    assert list(holder.held.items()) == [("a", 1), (now, 2), ("c", now)]


def test_a_module_that_a_list_hides(places) -> None:
    before, now, replacements = places
    hidden = nn.Linear(2, 1, bias=False)
    hidden.weight = before
    rebind_held([Own(hidden=[nn.Sequential(hidden)])], replacements)
    assert hidden.weight is now


def test_circles_end(places) -> None:
    before, now, replacements = places
    holder = Own(held=[before])
    holder.held += [holder.held, holder]
    rebind_held([holder], replacements)
    assert holder.held[0] is now


def test_what_is_met_far_down_first_is_looked_into_from_above(places) -> None:
    before, now, replacements = places
    shared = [[before]]
    far: Any = shared
    for _ in range(6):
        far = [far]
    rebind_held([Own(far=far, near=shared)], replacements)
    assert shared[0][0] is now


def test_optimizers_are_left_alone(places) -> None:
    before, _, replacements = places
    optimizer = torch.optim.SGD([before], lr=0.1)
    rebind_held(
        [Own(held=optimizer, wrapped=Own(optimizer=optimizer, param_groups=optimizer.param_groups))], replacements
    )
    assert optimizer.param_groups[0]["params"][0] is before
