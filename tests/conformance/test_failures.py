"""A rank raises, is killed or hangs: the others end with an error that names it, and the last checkpoint is whole."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_autoparallel.checkpoint import consolidate
from tests.conformance.failing import AT, HOWS, WHERES, Fault, fit
from tests.support.scripts import started
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

pytestmark = pytest.mark.conformance

FOLDER = (("save_distributed_checkpoint", True),)
ASYNC = (("async_save", True),)
MODULES = (("capture", "forward"),)
COMBINED = [Fault(how, where) for how in HOWS for where in WHERES if where != "saving"]
SAVING = [
    Fault(how, "saving", rank, options=options)
    for how in HOWS
    for rank, options in [(1, FOLDER), (0, FOLDER), (0, ()), (0, ASYNC), (1, (*FOLDER, *ASYNC))]
]
OTHERS = [
    *(Fault(how, "hook", rank=0) for how in HOWS),
    *(Fault(how, "step", options=MODULES) for how in HOWS),
]
OF_FOUR = [
    *(Fault(how, where, rank, ranks=4) for how in HOWS for where, rank in [("hook", 2), ("validation", 0)]),
    *(Fault(how, "step", 3, ranks=4) for how in HOWS),
    *(Fault(how, "saving", 3, options=FOLDER, ranks=4) for how in HOWS),
]
FAULTS = [*COMBINED, *SAVING, *OTHERS, *OF_FOUR]
DEFAULT = {"raises-validation-rank1", "killed-hook-rank0"}  # one that hangs takes a minute of waiting
AT_FAULT = {
    "raises": "rank {} has failed: ValueError: a fault of the test (failing.py:",
    "killed": "rank {} is gone without a word: killed",
    "hangs": "rank {} has not come: it is at ",
}
ITS_END = {"raises": "ValueError: a fault of the test", "killed": "exit code -9", "hangs": "exit code 1"}


# how, rank, launcher
LAUNCHED = [
    ("raises", 0, "lightning"),
    ("killed", 1, "lightning"),
    ("hangs", 1, "lightning"),
    ("hangs", 0, "lightning"),
    ("killed", 0, "torchrun"),
    ("raises", 1, "torchrun"),
]
MARK = "TEST_OF_FAILURES"


def step_saved(path: Path) -> Any:
    """The step at which the checkpoint was saved, all of which is read."""
    if path.is_dir():
        file = path.with_suffix(".file")
        consolidate(str(path), str(file))
        path = file
    return torch.load(path, weights_only=True)["global_step"]


@pytest.mark.parametrize("fault", tiered(FAULTS, lambda fault: str(fault) in DEFAULT), ids=str)
def test_the_others_end_and_name_the_rank(fault: Fault, worlds: Worlds, tmp_path: Path) -> None:
    endings = worlds(fault.ranks).endings(fit, str(tmp_path), fault)
    assert ITS_END[fault.how] in str(endings[fault.rank])
    # these ranks end together
    in_step = fault.where == "step" and fault.how == "raises"
    in_file = fault.where == "saving" and fault.how == "raises" and FOLDER[0] not in fault.options
    expected = "rank {} stopped: ValueError: a fault of the test" if in_step else AT_FAULT[fault.how]
    expected = "rank {} has failed: ValueError: a fault of the test" if in_file else expected
    for rank in set(range(fault.ranks)) - {fault.rank}:
        other = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert other["kind"] in ("OtherRankError", "CheckpointError")
        assert expected.format(fault.rank) in other["text"]
    before = AT - 1 if fault.where == "saving" else AT
    assert step_saved(tmp_path / "run.ckpt") in ([AT - 1, AT] if ASYNC[0] in fault.options else [before])


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes where Linux has them")
@pytest.mark.parametrize(("how", "rank", "launcher"), LAUNCHED)
def test_no_process_is_left(how: str, rank: int, launcher: str, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] * (launcher == "torchrun")
    script = ["-m", "tests.conformance.failing", str(tmp_path), how, "hook", str(rank), "60"]
    (ended,) = started([sys.executable, *torchrun, *script], **{MARK: str(tmp_path)})
    assert ended.code != 0
    deadline = time.monotonic() + 60
    while left := marked(str(tmp_path)):
        assert time.monotonic() < deadline, left
        time.sleep(1)
    other = json.loads((tmp_path / f"rank{1 - rank}.json").read_text())
    assert other["kind"] == "OtherRankError"
    assert f"rank {rank} " in other["text"]
    assert step_saved(tmp_path / "run.ckpt") == AT


def marked(mark: str) -> list[str]:
    """Processes that were started for this test."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(folder.name)
    return found
