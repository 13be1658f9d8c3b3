"""Reports by kind of module."""

from dataclasses import replace

from lightning_autoparallel.callbacks.kinds import (
    block_collectives,
    blocks_table,
    kind_of,
    kinds,
    kinds_table,
)
from lightning_autoparallel.callbacks.plan_report import report_tables
from lightning_autoparallel.callbacks.tables import render_table
from lightning_autoparallel.contracts import CollectiveCount, ModuleReport, ParameterReport, PlanReport
from lightning_autoparallel.fx import nodes as fxn


def _parameter(optimizer=8, placements=None):
    return ParameterReport(
        shape=(4, 2),
        local_shape=(2, 2),
        dtype="float32",
        placements=placements or {"dp_shard": "S(0)", "tp": "R"},
        parameter_bytes=16,
        gradient_bytes=4,
        optimizer_bytes=optimizer,
    )


def _gathers(count):
    return {"forward": {"all_gather": {"dp_shard": CollectiveCount(count=count, size_bytes=100 * count)}}}


def _report(**parameters):
    return PlanReport(
        graph="training_step",
        mesh={"dp_shard": 2},
        plan="fsdp",
        timings_s={},
        collectives={},
        saved_bytes=111,
        parameters_bytes=48,
        gradients_bytes=12,
        parameters={
            "embed.weight": _parameter(),
            "layers.0.wq.weight": _parameter(),
            "layers.1.wq.weight": _parameter(placements={"dp_shard": "R"}),
            **parameters,
        },
        modules=(
            ModuleReport(path="", saved_bytes=1, collectives={}),
            ModuleReport(path="layers.0.wq", saved_bytes=10, collectives=_gathers(1)),
            ModuleReport(path="layers.1.wq", saved_bytes=0, collectives=_gathers(2)),
            ModuleReport(path="layers.1", saved_bytes=100, collectives={}),
        ),
    )


def test_numbers_in_a_path_are_one_kind_but_numbers_in_a_name_are_not():
    assert kind_of("model.layers.12.feed_forward.w1") == "model.layers.*.feed_forward.w1"


def test_a_block_is_the_outermost_repeated_module():
    assert (fxn.block_of("a.3.b.1.c"), fxn.block_of("a.b")) == ("a.3", None)


def test_kinds_sum_up_their_modules_and_blocks_their_kinds():
    rows = {
        row.kind: (row.modules, row.parameters, row.gradients, row.optimizer, row.saved) for row in kinds(_report())
    }
    assert rows == {
        "": (1, 0, 0, 0, 1),
        "layers.*": (2, 32, 8, 16, 110),
        "layers.*.wq": (2, 32, 8, 16, 10),
        "layers.*.(itself)": (1, 0, 0, 0, 100),
        "embed": (1, 16, 4, 8, 0),
    }


def test_one_unknown_optimizer_makes_the_sum_unknown():
    rows = {row.kind: row.optimizer for row in kinds(_report(**{"layers.2.wq.weight": _parameter(optimizer=None)}))}
    assert rows["layers.*"] is rows["layers.*.wq"] is None
    assert rows["embed"] == 8


def test_the_table_shows_placements_where_they_differ():
    lines = [" ".join(line.split()) for line in render_table(kinds_table(_report())).splitlines()]
    assert ".wq weight {dp_shard: S(0), tp: R}; weight {dp_shard: R} 2 32 B 8 B 16 B 10 B" in lines
    assert "embed weight {dp_shard: S(0), tp: R} 1 16 B 4 B 8 B 0 B" in lines
    assert "all 48 B 12 B unknown 111 B" in lines


def test_collectives_of_blocks_are_means():
    assert [(*row[:4], row[4]) for row in block_collectives(_report())] == [
        ("layers.*", "forward", "all_gather", "dp_shard", 1.5)
    ]
    lines = [" ".join(line.split()) for line in render_table(blocks_table(_report())).splitlines()]
    assert "layers.* forward all_gather dp_shard 1.5 150 B" in lines


def test_no_table_of_blocks_where_no_launch_is_of_one_alone():
    """As where buckets hold what belongs to several."""
    whole = ModuleReport(path="", saved_bytes=1, collectives=_gathers(1))
    titles = [[str(table.title) for table in report_tables(each)] for each in (_report(), _without_blocks(whole))]
    assert [sum("by kind of block" in title for title in each) for each in titles] == [1, 0]
    assert len(titles[0]) == len(titles[1]) + 1


def _without_blocks(whole: ModuleReport) -> PlanReport:
    return replace(_report(), modules=(whole,))
