"""The processes of one measurement: started together, watched, and ended when one of them fails."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lightning_autoparallel.cli.bench.measurements import Job, Measurement, RankResult, combine

PROGRAM = "lightning_autoparallel.cli.bench.rank"
# What a launcher around this command may have set: the ranks of a measurement are told anew who they are.
_OF_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "GROUP_", "ROLE_", "LOCAL_", "NODE_RANK", "RANK", "WORLD_SIZE")
_POLL_S = 0.1
_GRACE_S = 3.0  # between the first failure and the end of the others, in which they may say what they saw


class MeasurementError(Exception):
    """A process of a measurement failed or took too long; the message says how, in its first line."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where ranks run: the command that starts a process there, and environment variables that hold there only."""

    prefix: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def measure(job: Job, *, threads: int, limit_s: float, hosts: Sequence[Host] = (Host(),)) -> Measurement:
    """Train in ``job.processes`` fresh processes, with an empty compiler cache, and put their results together.

    The first ranks run on the first of ``hosts``, and so on, as many on each.

    Raises:
        MeasurementError: a process failed or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="autoparallel-bench-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(asdict(job)))
        codes = run_ranks([sys.executable, "-m", PROGRAM, name], folder, job.processes, threads, limit_s, hosts)
        return combine(_results(folder, codes))


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does: with its ranks, and with whatever else a ``with`` block holds."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def result_path(folder: Path, rank: int) -> Path:
    """Where a rank writes what it measured."""
    return folder / f"rank{rank}.json"


def error_path(folder: Path, rank: int) -> Path:
    """Where a rank writes what it failed with."""
    return folder / f"rank{rank}.error"


def run_ranks(
    command: Sequence[str],
    folder: Path,
    processes: int,
    threads: int,
    limit_s: float,
    hosts: Sequence[Host] = (Host(),),
) -> list[int | None]:
    """Run ``command`` in every rank, printing to ``rank<N>.log``; exit codes, None for ranks that were ended.

    After ``limit_s`` seconds all ranks are ended.
    """
    shared = environment(os.environ, folder, processes, threads)
    with ExitStack() as stack:
        ranks = []
        for rank in range(processes):
            log = stack.enter_context((folder / f"rank{rank}.log").open("w"))
            host = hosts[rank * len(hosts) // processes]
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **host.environment}
            whole = [*host.prefix, *command]
            ranks.append(subprocess.Popen(whole, env={**shared, **own}, stdout=log, stderr=subprocess.STDOUT))
            stack.callback(_end, ranks[-1])
        return _wait(ranks, limit_s)


def environment(inherited: Mapping[str, str], folder: Path, processes: int, threads: int) -> dict[str, str]:
    """What all ranks of a measurement share: one rendezvous, so many threads each, an empty compiler cache."""
    kept = {name: value for name, value in inherited.items() if not name.startswith(_OF_LAUNCHERS)}
    kept.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    return kept | {
        # they import what this process can: the package and the user's modules, wherever they lie
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(processes),
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


def _wait(ranks: Sequence[subprocess.Popen[bytes]], limit_s: float) -> list[int | None]:
    deadline = time.monotonic() + limit_s
    while None in (codes := [rank.poll() for rank in ranks]):
        if any(codes):  # the others may wait for it for ever
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    return [rank.poll() for rank in ranks]


def _end(rank: subprocess.Popen[bytes]) -> None:
    if rank.poll() is None:
        rank.kill()
    rank.wait()


def _results(folder: Path, codes: Sequence[int | None]) -> list[RankResult]:
    """What the ranks wrote; how they exit after that is none of the measurement's business."""
    paths = [result_path(folder, rank) for rank in range(len(codes))]
    if not all(path.is_file() for path in paths):
        raise MeasurementError(failure(folder, codes))
    return [RankResult(**json.loads(path.read_text())) for path in paths]


def failure(folder: Path, codes: Sequence[int | None]) -> str:
    """What went wrong: the error that was written first, otherwise how a rank ended and the last line it printed."""
    errors = [path for rank in range(len(codes)) if (path := error_path(folder, rank)).is_file()]
    if errors:
        return min(errors, key=lambda path: path.stat().st_mtime_ns).read_text()
    failed = next((rank for rank, code in enumerate(codes) if code), None)
    if failed is None:
        return "took too long and was ended"
    return f"rank {failed} {_how_it_ended(codes[failed])}: {_last_line(folder / f'rank{failed}.log')}"


def _how_it_ended(code: int | None) -> str:
    assert code is not None
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
