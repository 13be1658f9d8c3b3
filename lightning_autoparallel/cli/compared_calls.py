"""Calls that have their operands and results elsewhere in another plan (``plan --compare``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.table import Table

from lightning_autoparallel.callbacks.tables import make_table
from lightning_autoparallel.cli.report_file import CallKind, Placed

Calls = Mapping[CallKind, Mapping[Placed, int]]  # counted by their placements
_NAMED = 3  # of calls that differ alike
OUTSIDE = "the step itself"  # what no submodule's code calls


@dataclass(frozen=True, kw_only=True)
class CallDifference:
    """Calls of modules of one kind, ``count`` of them in each of two plans, that are placed so in one of them alone.

    Where they are not all alike in a plan, it is told how many are placed in which way.
    """

    module: str
    backward: bool
    calls: tuple[str, ...]
    count: int
    this: str
    other: str


def call_differences(here: Calls, there: Calls) -> list[CallDifference]:
    """Kinds of calls of which not as many lie alike in both; those that differ alike are one.

    A kind of which there are calls in one plan only is left out.
    """
    found: dict[tuple[str, bool, str, str], list[tuple[str, int]]] = {}
    for kind in (kind for kind in here if kind in there):
        one, two = _more(here[kind], there[kind]), _more(there[kind], here[kind])
        if one and two:
            count = min(sum(one.values()), sum(two.values()))
            found.setdefault((kind.module, kind.backward, *_texts(one, two)), []).append((kind.call, count))
    return [
        CallDifference(
            module=module,
            backward=backward,
            calls=tuple(dict.fromkeys(call for call, _ in calls)),
            count=sum(count for _, count in calls),
            this=one,
            other=two,
        )
        for (module, backward, one, two), calls in found.items()
    ]


def _more(these: Mapping[Placed, int], others: Mapping[Placed, int]) -> dict[Placed, int]:
    """By how many more calls are placed so."""
    more = {placed: count - others.get(placed, 0) for placed, count in these.items()}
    return {placed: count for placed, count in more.items() if count > 0}


def _texts(one: Mapping[Placed, int], two: Mapping[Placed, int]) -> tuple[str, str]:
    """Where calls lie one way in each plan, on the axes that differ; else every way."""
    if len(one) > 1 or len(two) > 1:
        return _mixture(one), _mixture(two)
    (here,), (there,) = one, two
    return _text(each for each in here if each not in there), _text(each for each in there if each not in here)


def _mixture(counted: Mapping[Placed, int]) -> str:
    ordered = sorted(counted.items(), key=lambda way: (-way[1], way[0]))
    return " | ".join(f"{count} x {_text(placed)}" for placed, count in ordered)


def _text(placed: Iterable[str]) -> str:
    return "; ".join(placed) or "whole"


def calls_table(here: Calls, there: Calls) -> Table:
    """Where calls differ, the first of each kind named."""
    found = call_differences(here, there)
    unmatched = len(here.keys() ^ there.keys())
    told = f"{unmatched} kinds of calls (operator and line) are in one of the reports only, and are not compared"
    caption = told if unmatched else None if found else "every call is placed alike in both"
    table = make_table(
        "Calls that are placed otherwise: results from operands",
        ("modules", "calls", "this", "other"),
        ("count",),
        caption=caption,
    )
    for one in found:
        module = one.module or OUTSIDE
        table.add_row(
            f"{module} (backward)" if one.backward else module, _named(one.calls), one.this, one.other, str(one.count)
        )
    return table


def _named(calls: tuple[str, ...]) -> str:
    more = len(calls) - _NAMED
    return ", ".join(calls[:_NAMED]) + (f" and {more} more" if more > 0 else "")
