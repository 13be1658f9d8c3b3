"""The MLP over a slow link without running it: arguments, the skip, and what the figures say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.benchmarks import slow_matmul as program
from tests.benchmarks.slow_matmul import WHOLE, Measured, Results

MEASURED = Measured(
    step_ms=[1000.0, 900.0, 1400.0],
    sent_bytes=[25e6, 25e6, 26e6],
    cpu_ms=[300.0, 310.0, 290.0],
    launches="1 all_gather",
    difference=0.0,
)
FASTER = replace(MEASURED, step_ms=[700.0, 650.0, 2000.0], launches="3 permute", difference=1e-7)
SLOWER = replace(MEASURED, step_ms=[1100.0, 1100.0, 1100.0])


def _results(**decomposed: Measured) -> Results:
    return Results(hidden=512, product_ms=250.0, contenders={WHOLE: MEASURED, **decomposed})


def test_rows_hold_medians_and_the_link_s_share():
    whole, cyclic = program.rows(_results(cyclic=FASTER), 400)
    # 25 MB are 200 Mbit: half a second at 400 mbit/s
    assert whole == [WHOLE, "1000.0", "900.0..1400.0", "1.00", "25.0", "500.0", "300.0", "1 all_gather", "0e+00"]
    assert cyclic == ["cyclic", "700.0", "650.0..2000.0", "0.70", "25.0", "500.0", "300.0", "3 permute", "1e-07"]
    assert len(whole) == len(program.HEADER)


def test_the_last_line_has_both_sides_of_the_fastest_order():
    results = _results(exchanged=replace(FASTER, step_ms=[1.0]), swizzle=SLOWER, cyclic=FASTER)
    assert program.fastest(results) == ("cyclic", 0.7)
    last = program.report(program.parse([]), results).splitlines()[-1]
    assert last == "decomposed (cyclic) 700.0 ms, whole 1000.0 ms, ratio 0.70 (at most 0.8)"


def test_it_is_met_by_one_order_and_by_equal_results_only():
    assert program.is_met(_results(swizzle=SLOWER, cyclic=FASTER))
    assert not program.is_met(_results(swizzle=SLOWER))
    assert not program.is_met(_results(cyclic=FASTER, swizzle=replace(SLOWER, difference=1e-3)))


def test_what_a_rank_writes_is_read():
    results = _results(cyclic=FASTER)
    assert program.read(program.write(results)) == results


def test_a_direction_carries_all_shards_but_one():
    # four shards of 1 MiB, three of which cross: 3 * 2**20 * 8 bits at 400 mbit/s
    arguments = program.parse(["--rows", "1024", "--width", "1024"])
    assert program.gather_ms(arguments) == pytest.approx(62.91456)


def test_the_status_says_that_it_was_skipped_and_the_message_why(monkeypatch, capsys):
    monkeypatch.setattr("tests.benchmarks.namespaces.shutil.which", lambda *_, **__: None)
    assert program.main([]) == program.SKIPPED
    assert capsys.readouterr().err == "skipped: ip (iproute2) is not installed\n"


@pytest.mark.parametrize("given", [["--rows", "6"], ["--hidden", "2"], ["--mbit", "0"], ["--orders", "ring"]])
def test_impossible_arguments_are_refused(given, capsys):
    with pytest.raises(SystemExit):
        program.parse(given)
    assert given[0] in capsys.readouterr().err
