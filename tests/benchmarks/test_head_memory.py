"""A real process's peak falls where a loss is computed in chunks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.head_memory import peak

TOKENS = 768


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads peaks where Linux has them")
def test_the_peak_of_a_process_falls() -> None:
    """Its logits are 375 MiB in float32, and its loss keeps several copies of them."""
    whole, chunked = (peak(2, TOKENS, chunks, compiles=True) for chunks in (1, 4))
    assert chunked.loss == pytest.approx(whole.loss, rel=1e-6)
    assert whole.measured_bytes > 2 * 375 * 2**20
    assert chunked.measured_bytes < 0.7 * whole.measured_bytes
    assert chunked.predicted_bytes < 0.5 * whole.predicted_bytes
