"""`plan --compare`: two reports side by side, by hand, and what is refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from lightning_autoparallel.callbacks.tables import render_table
from lightning_autoparallel.cli.compare import (
    Difference,
    check_comparable,
    comparison_tables,
    cost_rows,
    differences,
    kind_rows,
)
from lightning_autoparallel.cli.compared_calls import CallDifference, call_differences
from lightning_autoparallel.cli.report_file import CallKind, figures_of, read_report
from lightning_autoparallel.errors import ConfigError


def parameter(placement: str, rows: int) -> dict[str, Any]:
    return {"shape": [8, 4], "local_shape": [rows, 4], "placements": {"dp_shard": placement}}


def graph(launches: int, kind: str = "all_gather", **times: float) -> dict[str, Any]:
    return {"collectives": {kind: {"dp_shard": {"count": launches, "bytes": 1024 * launches}}}, **times}


REPORT: dict[str, Any] = {
    "plan": "fsdp",
    "mesh": {"dp_shard": 2},
    "hardware": {"name": "h100"},
    "step_time_us": 30.0,
    "forward": graph(2, compute_us=5.0, exposed_us=1.0),
    "backward": graph(1, "reduce_scatter", compute_us=10.0, exposed_us=2.0),
    "parameters": {f"layers.{i}.weight": parameter("S(0)", 4) for i in range(3)} | {"head": parameter("S(0)", 4)},
    "parameters_bytes": 256,
    "gradients_bytes": 256,
    "optimizer_bytes": None,
    "training_peak_bytes": 4096,
}


def other() -> dict[str, Any]:
    """As ddp would have it: whole layers, and one more launch on another axis."""
    changed = copy.deepcopy(REPORT)
    changed.update(step_time_us=28.5, parameters_bytes=1280, optimizer_bytes=7)
    changed["parameters"].update({f"layers.{i}.weight": parameter("R", 8) for i in range(3)})
    changed["forward"] = graph(0, compute_us=5.0, exposed_us=4.0)
    changed["backward"]["collectives"]["all_reduce"] = {"tp": {"count": 1, "bytes": 10}}
    return changed


def test_equal_layers_are_one_line() -> None:
    found = differences(figures_of(REPORT), figures_of(other()))
    here, there = "{dp_shard: S(0)} [4, 4]", "{dp_shard: R} [8, 4]"
    assert found == [Difference(kind="layers.*.weight", count=3, this=here, other=there)]
    assert differences(figures_of(REPORT), figures_of(REPORT)) == []


def test_costs_are_this_other_and_their_difference() -> None:
    assert list(cost_rows(figures_of(REPORT), figures_of(other()))) == [
        ("step", "30.0 us", "28.5 us", "+1.5 us"),
        ("step, for each row of its batch", "unknown", "unknown", "unknown"),
        ("computing", "15.0 us", "15.0 us", "0.0 us"),
        ("exposed communication", "3.0 us", "6.0 us", "-3.0 us"),
        ("collectives on dp_shard", "3", "1", "+2"),
        ("bytes on dp_shard", "3.0 KiB", "1.0 KiB", "+2.0 KiB"),
        ("collectives on tp", "0", "1", "-1"),
        ("bytes on tp", "0 B", "10 B", "-10 B"),
        ("parameters", "256 B", "1.2 KiB", "-1.0 KiB"),
        ("gradients", "256 B", "256 B", "0 B"),
        ("optimizer", "unknown", "7 B", "unknown"),
        ("peak, with parameters and optimizer", "4.0 KiB", "4.0 KiB", "0 B"),
    ]


def test_steps_of_more_rows_are_compared_by_row() -> None:
    half = {**other(), "samples": 16}
    this, that = figures_of({**REPORT, "samples": 32}), figures_of(half)
    rows = {row[0]: row[1:] for row in cost_rows(this, that)}
    assert rows["step"] == ("30.0 us", "28.5 us", "+1.5 us")
    assert rows["step, for each row of its batch"] == ("0.9 us", "1.8 us", "-0.8 us")
    caption = str(comparison_tables(this, that)[-1].caption)
    assert "h100, 32 rows a step" in caption and "h100, 16 rows a step" in caption


def module(path: str, saved: int, launches: int, graph: str = "forward") -> dict[str, Any]:
    counted = {"all_gather": {"tp": {"count": launches, "bytes": 100 * launches}}}
    return {"path": path, "saved_bytes": saved, "collectives": {graph: counted} if launches else {}}


def timed(report: dict[str, Any], **times: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """The report with times of modules in both graphs: of computing, and of what is exposed."""
    return {**report, **{name: report[name] | {"by_module": times.get(name, {})} for name in ("forward", "backward")}}


def test_kinds_of_modules_that_take_save_or_move_otherwise() -> None:
    """By hand: two norms more in the sum of a kind; what is alike is left out, and graphs of evaluation are no step."""
    alike = module("head", 8, 3)
    layers = [module(f"layers.{i}.norm", 10, 1) for i in range(2)]
    here = timed(
        {**REPORT, "modules": [*layers, alike, module("extra", 0, 9, "inference")]},
        forward={"layers.0.norm": (1.0, 0.5), "layers.1.norm": (1.0, 0.5), "head": (3.0, 0.0)},
        backward={"layers.0.norm": (2.0, 0.0), "plain": (1.0, 0.01)},
    )
    there = timed(
        {**REPORT, "modules": [module("layers.0.norm", 5, 1, "backward"), alike, module("", 600, 0)]},
        forward={"layers.0.norm": (4.0, 0.0), "plain": (1.0, 0.0)},
        backward={"head": (2.0, 1.0)},
    )
    assert list(kind_rows(figures_of(here), figures_of(there))) == [
        ("layers.*.norm", "exposed communication", "1.0 us", "0.0 us", "+1.0 us"),
        ("layers.*.norm", "saved for the backward", "20 B", "5 B", "+15 B"),
        ("layers.*.norm", "collectives", "2", "1", "+1"),
        ("layers.*.norm", "bytes moved", "200 B", "100 B", "+100 B"),
        ("the step itself", "saved for the backward", "0 B", "600 B", "-600 B"),
        ("head", "computing", "3.0 us", "2.0 us", "+1.0 us"),
        ("head", "exposed communication", "0.0 us", "1.0 us", "-1.0 us"),
    ]
    assert list(kind_rows(figures_of(here), figures_of(here))) == []
    assert [len(comparison_tables(figures_of(here), figures_of(other))) for other in (there, REPORT)] == [3, 2]
    untimed = {**there, "backward": REPORT["backward"]}
    names = [row[1] for row in kind_rows(figures_of(here), figures_of(untimed))]
    assert names == ["saved for the backward", "saved for the backward", "collectives", "bytes moved"]


def calls(text: str, *, module: str = "layers.*.ff", name: str = "aten.mm", count: int = 2, **more: Any) -> Any:
    placements = {"dp_shard": "S(0) from S(0), R", "tp": text}
    return {"module": module, "call": name, "backward": False, "count": count, "placements": placements, **more}


def test_calls_that_are_placed_otherwise_are_one_line_by_what_differs() -> None:
    """By hand: products and sums differ alike; one of three gathers does; what is alike or in one plan only is not."""
    here = [
        calls("S(1) from R, S(1)"),
        calls("S(1) from R, S(1)", name="aten.add"),
        calls("R from R", name="aten.relu"),
        calls("S(0) from S(0)", name="aten.embedding", module="", count=2),
        calls("R from R", name="aten.embedding", module="", count=1),
        calls("R from R", name="aten.only_here"),
    ]
    there = [
        calls("R from R, R", backward=True),
        calls("R from R, R"),
        calls("R from R, R", name="aten.add"),
        calls("R from R", name="aten.relu"),
        calls("S(0) from S(0)", name="aten.embedding", module="", count=3),
    ]
    this, that = (figures_of({**REPORT, "calls": side}) for side in (here, there))
    assert this.calls is not None and that.calls is not None
    layer = CallDifference(
        module="layers.*.ff",
        backward=False,
        calls=("aten.mm", "aten.add"),
        count=4,
        this="tp: S(1) from R, S(1)",
        other="whole",
    )
    table = CallDifference(
        module="", backward=False, calls=("aten.embedding",), count=1, this="whole", other="tp: S(0) from S(0)"
    )
    assert call_differences(this.calls, that.calls) == [layer, table]
    assert call_differences(this.calls, this.calls) == []
    text = render_table(comparison_tables(this, that)[1])
    assert "layers.*.ff" in text and "aten.mm, aten.add" in text and "the step itself" in text
    assert "placed alike in both" in render_table(comparison_tables(this, this)[1])
    assert len(comparison_tables(this, figures_of(REPORT))) == 2  # written before calls were


def test_calls_of_one_kind_that_lie_in_several_ways_are_told_with_all_axes() -> None:
    here = figures_of({**REPORT, "calls": [calls("S(0) from S(0)", count=1), calls("S(1) from S(1)", count=2)]}).calls
    there = figures_of({**REPORT, "calls": [calls("R from R", count=3)]}).calls
    assert here is not None and there is not None
    (found,) = call_differences(here, there)
    rows = "dp_shard: S(0) from S(0), R"
    assert found.this == f"2 x {rows}; tp: S(1) from S(1) | 1 x {rows}; tp: S(0) from S(0)"
    assert (found.other, found.count) == (f"3 x {rows}", 3)


def test_calls_that_only_one_report_has_are_not_said_to_be_alike() -> None:
    """As where a line was added above them since the other was written."""
    here = figures_of({**REPORT, "calls": [calls("R from R", name="aten.mm.default (model.py:3)")]})
    there = figures_of({**REPORT, "calls": [calls("S(1) from S(1)", name="aten.mm.default (model.py:4)")]})
    text = render_table(comparison_tables(here, there)[1])
    assert "2 kinds of calls (operator and line) are in one of the reports only" in text and "alike" not in text


def test_axes_that_one_plan_treats_as_one_are_compared_one_by_one() -> None:
    """As `fsdp` has it, and as `auto` has it."""
    joint = {**parameter("S(0)", 2), "placements": {"dp_replicate,dp_shard": "S(0)"}}
    apart = {**joint, "placements": {"dp_replicate": "S(0)", "dp_shard": "S(0)"}}
    both = {"dp_replicate": "S(0) from R, S(0)", "dp_shard": "S(0) from R, S(0)"}
    here = {"parameters": {"head": joint}, "calls": [calls("", placements={"dp_replicate,dp_shard": both["dp_shard"]})]}
    there = {"parameters": {"head": apart}, "calls": [calls("", placements=both)]}
    this, that = figures_of({**REPORT, **here}), figures_of({**REPORT, **there})
    assert this.calls is not None and that.calls is not None
    assert differences(this, that) == [] and call_differences(this.calls, that.calls) == []


def test_calls_that_nothing_cuts_are_whole() -> None:
    whole = calls("R from R", placements={"tp": "R from R"})
    assert figures_of({**REPORT, "calls": [whole]}).calls == {
        CallKind(module="layers.*.ff", call="aten.mm", backward=False): {(): 2}
    }


def test_a_graph_without_predictions_leaves_times_unknown() -> None:
    bare = {**REPORT, "step_time_us": None, "forward": graph(2)}
    assert set(figures_of(bare).times_us.values()) == {None}


@pytest.mark.parametrize("text", ["no json", "[]", "{}", json.dumps({**REPORT, "parameters": {"a": 1}}), None])
def test_what_is_no_report_is_refused(tmp_path, text: str | None) -> None:
    file = tmp_path / "other.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json (is no report|cannot be read).*plan --output FILE"):
        read_report(file)


def test_another_model_is_refused() -> None:
    there = figures_of(REPORT, "o.json")
    shapes = {name: lain.shape for name, lain in there.parameters.items()}
    check_comparable(shapes, there)
    check_comparable({}, there, whole=False)
    with pytest.raises(ConfigError, match=r"o\.json is .* head has shape \[9, 4\] here, and has shape \[8, 4\] there"):
        check_comparable({"head": (9, 4)}, there, whole=False)
    with pytest.raises(ConfigError, match=r"head is missing here, and has shape \[8, 4\] there"):
        check_comparable({name: shape for name, shape in shapes.items() if name != "head"}, there)
