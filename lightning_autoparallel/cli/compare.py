"""Two reports side by side: what lies elsewhere or is moved otherwise, and what that costs (``plan --compare``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from lightning_autoparallel.callbacks.predictions import format_time
from lightning_autoparallel.callbacks.tables import make_table
from lightning_autoparallel.cli.compared_calls import OUTSIDE, calls_table
from lightning_autoparallel.cli.report_file import KindFigures, Lain, PlanFigures
from lightning_autoparallel.cost.sizes import format_bytes
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.fx.nodes import kind_of

UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Parameters of one kind, ``count`` of them, that lie alike in each of two plans, but not in both."""

    kind: str
    count: int
    this: str
    other: str


def check_comparable(shapes: Mapping[str, tuple[int, ...]], other: PlanFigures, whole: bool = True) -> None:
    """Whether the other report is of parameters of these shapes; where not ``whole``, of those known in both.

    Raises:
        ConfigError: it is not; the message names the first parameter that differs.
    """
    there = {name: lain.shape for name, lain in other.parameters.items()}
    names = [*shapes, *(name for name in there if name not in shapes)] if whole else [n for n in shapes if n in there]
    for name in names:
        if shapes.get(name) != there.get(name):
            raise ConfigError(
                f"--compare {other.path} is a report of another model: {name} {_shape(shapes.get(name))} here, and "
                f"{_shape(there.get(name))} there; plan this model with --output, and compare with that file"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "is missing" if shape is None else f"has shape {list(shape)}"


def differences(this: PlanFigures, other: PlanFigures) -> list[Difference]:
    """Parameters whose placements or shards differ, those of equal layers as one."""
    counted: Counter[tuple[str, str, str]] = Counter()
    for name, here in this.parameters.items():
        there = other.parameters[name]
        if _where(here) != _where(there):
            counted[kind_of(name), _where(here), _where(there)] += 1
    return [
        Difference(kind=kind, count=count, this=here, other=there) for (kind, here, there), count in counted.items()
    ]


def _where(lain: Lain) -> str:
    named = ", ".join(f"{axis}: {placement}" for axis, placement in lain.placements.items())
    return f"{{{named}}} {list(lain.local_shape)}"


def comparison_tables(this: PlanFigures, other: PlanFigures) -> list[Table]:
    """Where two plans of one model differ, and what each costs."""
    costs = make_table(
        "What they cost one rank (predicted)",
        ("",),
        ("this", "other", "difference"),
        caption=f"this: {_named(this)}\nother: {_named(other)}, of {other.path}\ndifference: this less the other",
    )
    for row in cost_rows(this, other):
        costs.add_row(*row)
    kinds = [] if this.kinds is None or other.kinds is None else [_kinds_table(this, other)]
    calls = [] if this.calls is None or other.calls is None else [calls_table(this.calls, other.calls)]
    return [_placements_table(this, other), *calls, *kinds, costs]


_ADD_UP = "differences of times add up to the step's, but for rounding; kinds that differ in nothing are left out"
_SAME = "every kind of module takes, saves and moves as much in both"


def _kinds_table(this: PlanFigures, other: PlanFigures) -> Table:
    rows = list(kind_rows(this, other))
    have_times = this.times_by_kind and other.times_by_kind
    table = make_table(
        "Kinds of modules that take, save or move otherwise, all modules of a kind together (predicted)",
        ("modules", "", "this", "other", "difference"),
        caption=(_ADD_UP if rows else _SAME) if have_times else "one of the reports has no times by kind of module",
    )
    for row in rows:
        table.add_row(*row)
    return table


def kind_rows(this: PlanFigures, other: PlanFigures) -> Iterator[tuple[str, str, str, str, str]]:
    """Every figure of a kind of module that is another one there; the kinds whose times differ most come first.

    Times are told where both reports have them, and differ by what is shown of them.
    """
    here, there, none = this.kinds or {}, other.kinds or {}, KindFigures()
    pairs = {kind: (here.get(kind, none), there.get(kind, none)) for kind in dict.fromkeys([*here, *there])}
    have_times = this.times_by_kind and other.times_by_kind
    for kind, (one, two) in sorted(
        pairs.items(), key=lambda pair: _apart(pair[1][0], pair[1][1], have_times), reverse=True
    ):
        times = [
            ("computing", one.computing_us, two.computing_us),
            ("exposed communication", one.exposed_us, two.exposed_us),
        ]
        for name, time_us, another_us in times if have_times else []:
            if format_time(time_us) != format_time(another_us):
                yield (kind or OUTSIDE, *_row(name, time_us, another_us, format_time))
        for name, value, another, text in (
            ("saved for the backward", one.saved_bytes, two.saved_bytes, format_bytes),
            ("collectives", one.launches, two.launches, str),
            ("bytes moved", one.moved_bytes, two.moved_bytes, format_bytes),
        ):
            if value != another:
                yield (kind or OUTSIDE, *_row(name, value, another, text))


def _apart(one: KindFigures, two: KindFigures, have_times: bool) -> tuple[float, int]:
    """By how much two kinds differ: in microseconds, as they are shown, then in bytes."""
    time_us = abs(one.computing_us + one.exposed_us - two.computing_us - two.exposed_us)
    in_bytes = abs(one.saved_bytes - two.saved_bytes) + abs(one.moved_bytes - two.moved_bytes)
    return round(time_us, 1) if have_times else 0.0, in_bytes


def _named(figures: PlanFigures) -> str:
    mesh = ", ".join(f"{axis}: {size}" for axis, size in figures.mesh.items())
    rows = "" if figures.samples is None else f", {figures.samples:,} rows a step"
    return f"plan {figures.plan} on {{{mesh}}}, for {figures.hardware}{rows}"


def _placements_table(this: PlanFigures, other: PlanFigures) -> Table:
    found = differences(this, other)
    caption = None if found else "every parameter lies alike in both"
    table = make_table(
        "Parameters that lie elsewhere: placements and shape of a rank's shard",
        ("parameters", "this", "other"),
        ("count",),
        caption=caption,
    )
    for one in found:
        table.add_row(one.kind, one.this, one.other, str(one.count))
    return table


def cost_rows(this: PlanFigures, other: PlanFigures) -> Iterator[tuple[str, str, str, str]]:
    """What is compared, as it is here, as it is there, and the difference."""
    for name, time in this.times_us.items():
        yield _row(name, time, other.times_us[name], format_time)
    for axes in dict.fromkeys([*this.collectives, *other.collectives]):
        here, there = this.collectives.get(axes, (0, 0)), other.collectives.get(axes, (0, 0))
        yield _row(f"collectives on {axes}", here[0], there[0], str)
        yield _row(f"bytes on {axes}", here[1], there[1], format_bytes)
    for name, size in this.sizes_bytes.items():
        yield _row(name, size, other.sizes_bytes[name], format_bytes)


def _row(name: str, this: Any, other: Any, text: Any) -> tuple[str, str, str, str]:
    shown = [UNKNOWN if value is None else text(value) for value in (this, other)]
    if this is None or other is None:
        return name, *shown, UNKNOWN  # type: ignore[return-value]
    sign = "+" if this > other else "-" if this < other else ""
    return name, *shown, f"{sign}{text(abs(this - other))}"  # type: ignore[return-value]
