"""Whether torch's gloo survives functional collectives that overlap on one group.

    python -m tests.benchmarks.gloo_overlap [SECONDS] [overlapped | one] [two | one]

Two ranks gather and scatter small tensors, all started before the first is waited for (`overlapped`), or one at a time;
the group has two threads, as torch makes it, or one, as this package does (nothing else of it runs).
Prints how many collectives each rank did, and the exit codes: a negative one is the signal that killed a rank.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autoparallel.torch_compat.gloo import one_gloo_thread

functional = torch.ops._c10d_functional
SIZES = (512, 256, 1536, 32, 1, 4096)
RANKS = 2


def _round(tensors: list[Tensor], group: str, overlapped: bool) -> int:
    """Gather and scatter every tensor once; how many collectives that were."""
    calls = [
        *(lambda x=x: functional.all_gather_into_tensor(x, RANKS, group) for x in tensors),
        *(lambda x=x: functional.reduce_scatter_tensor(torch.cat([x] * RANKS), "sum", RANKS, group) for x in tensors),
    ]
    if overlapped:
        for started in [call() for call in calls]:
            functional.wait_tensor(started)
    else:
        for call in calls:
            functional.wait_tensor(call())
    return len(calls)


def _rank(rank: int, port: int, seconds: float, overlapped: bool, threads: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    with one_gloo_thread() if threads == "one" else contextlib.nullcontext():
        group = dist.new_group(list(range(RANKS))).group_name
    tensors = [torch.randn(size) for size in SIZES]
    end, done, stop = time.monotonic() + seconds, 0, torch.zeros(1)
    while not stop.item():
        for _ in range(50):
            done += _round(tensors, group, overlapped)
        stop.fill_(time.monotonic() > end)
        dist.all_reduce(stop)
    print(f"rank {rank}: {done} collectives", flush=True)
    os._exit(0)


def main(seconds: float, mode: str, threads: str) -> None:
    """Run both ranks and print how they ended."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = get_context("spawn")
    ranks = [
        context.Process(target=_rank, args=(rank, port, seconds, mode == "overlapped", threads))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(seconds + 60)
    print(f"{mode}, {threads} threads: exit codes {[process.exitcode for process in ranks]}")
    for process in ranks:
        process.kill()


if __name__ == "__main__":
    given = dict(enumerate(sys.argv))
    main(float(given.get(1, 30)), given.get(2, "overlapped"), given.get(3, "two"))
