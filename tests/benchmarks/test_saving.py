"""Host memory while checkpoints are saved and loaded, beside the rank's share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.saving import KINDS, MODES, measured, table


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads peaks where Linux has them")
def test_memory_of_saving_and_loading() -> None:
    costs = measured(1440)
    for mode in MODES:
        folder, file = costs["folder", mode], costs["file", mode]
        assert folder.share_bytes > 70e6
        assert folder.saving_bytes <= 1.5 * folder.share_bytes
        assert folder.loading_bytes <= 1.5 * folder.share_bytes
        assert file.saving_bytes <= 1.1 * 2 * file.share_bytes  # the whole state, once
        assert file.loading_bytes <= 1.5 * file.share_bytes
        assert file.loading_bytes >= 0.6 * file.share_bytes  # the optimizer's shards are there, and were seen
    assert len(table(costs)) == len(KINDS) * len(MODES) + len(KINDS)
