"""What is predicted of published runs is what was published, within a tenth of it either way."""

from __future__ import annotations

import pytest

from tests.benchmarks.published import CASES, FSDP, HARDWARE, Case, figures_of, planned

CLOSE = 1.10


def test_figures_of_a_report() -> None:
    """By hand: what is reserved is more than what is alive by a share of it."""
    case = Case(recipe="", ranks=8, rows=1, options=FSDP, tokens_per_second=100, memory_gib=4.0)
    report = {
        "tokens_per_second_per_device": 120.0,
        "training_peak_bytes": 4 * 2**30,
        "hardware": {"reserved_share": 0.25},
    }
    tokens, memory = figures_of(case, report)
    assert (tokens.ratio, memory.ratio) == (1.2, 1.25)
    assert str(memory) == "predicted 5.0 GiB reserved, published 4.0: 1.250"


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_predictions_are_close_to_what_is_published(name: str) -> None:
    figures = figures_of(CASES[name], planned(CASES[name], HARDWARE))
    assert len(figures) == (1 if CASES[name].memory_gib is None else 2)
    assert all(1 / CLOSE <= figure.ratio <= CLOSE for figure in figures), list(map(str, figures))
