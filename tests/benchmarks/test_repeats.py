"""What is solved for a deep network is no larger than for a shallow one, so that it takes no longer."""

from __future__ import annotations

import pytest

from tests.benchmarks.repeats import solved


@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_the_problem_is_of_one_size_at_any_depth() -> None:
    """Of 8, of 32 and of 126 layers of LLaMA-3 8B's width, on the recipe's mesh."""
    sizes = {layers: (found.columns, found.rows) for layers in (8, 32, 126) for found in [solved(layers, 128)]}
    assert len(set(sizes.values())) == 1, sizes
