"""Every test runs as if it were alone: one that leaves process-wide state behind fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.hermetic import no_leaks
from tests.support.worlds import Worlds

# Their files share worlds, one of each size to a folder; the ranks of both leave few cores idle.
WORLDS = ("tests/distributed", "tests/numerics", "tests/semantics")
STARTS_ITS_OWN = "tests/distributed/test_launch.py"
ON_A_GPU = "tests/gpu"  # every process has a world of one, and most of a test is compiling


class WorldsTogether(LoadScopeScheduling):
    """Sends tests to processes by file, those that run in worlds by folder, and those on a GPU one by one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        folder = file.rpartition("/")[0]
        if folder == ON_A_GPU:
            return nodeid
        return folder if folder in WORLDS and file != STARTS_ITS_OWN else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WorldsTogether:
    """How tests are spread over the processes of `-n`."""
    return WorldsTogether(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table of the third-party models, where any were trained."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    rows = sorted(str(row) for report in reports for name, row in report.user_properties if name == "thirdparty")
    if rows:
        terminalreporter.write_sep("=", "third-party models")
        terminalreporter.write_line("\n".join(rows))


@pytest.fixture(autouse=True)
def hermetic() -> Iterator[None]:
    """Fail the test if it leaves behind what `tests/support/hermetic.py` lists."""
    with no_leaks():
        yield


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Gloo worlds by size, each started at its first use and shared by all tests."""
    started = Worlds()
    yield started
    started.stop()
