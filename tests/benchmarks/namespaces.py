"""Two network namespaces of one machine, joined by a link of a given rate: a slow network without a second machine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lightning_autoparallel.cli.bench.processes import Host

PREFIX = "lap"
_NAME = re.compile(rf"^{PREFIX}(\d+)[ab]\b", re.MULTILINE)
_INTERFACE = "link0"  # of the same name in both: a namespace has its own
Run = Callable[[Sequence[str]], str]


class NotAllowedError(Exception):
    """This machine or this user cannot make the link; the message is the reason."""


def call(command: Sequence[str]) -> str:
    """Run a command of iproute2 and return what it printed.

    Raises:
        NotAllowedError: it is not installed, or refused.
    """
    done = subprocess.run([_program(command[0]), *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotAllowedError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _program(name: str) -> str:
    # not everybody's PATH has the folders for administrators
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if found is None:
        raise NotAllowedError(f"{name} (iproute2) is not installed")
    return found


def names(pid: int) -> tuple[str, str]:
    """Both namespaces of a process: unique while it lives, so that two runs do not meet."""
    return f"{PREFIX}{pid}a", f"{PREFIX}{pid}b"


@contextlib.contextmanager
def slow_link(mbit: float | None, run: Run = call) -> Iterator[list[Host]]:
    """Two hosts whose only way to each other sends ``mbit`` megabits per second and direction, None: as many as it can.

    The namespaces are there until the ``with`` block ends, however it does; those of dead processes are removed first.

    Raises:
        NotAllowedError: namespaces or rates cannot be made here; nothing is left behind.
    """
    _remove_stale(run)
    pair = names(os.getpid())
    with contextlib.ExitStack() as stack:
        for name in pair:
            run(["ip", "netns", "add", name])
            stack.callback(_remove, name, run)
        _join(pair, mbit, run)
        yield [_host(name, _address(0)) for name in pair]


def _join(pair: tuple[str, str], mbit: float | None, run: Run) -> None:
    ends = ("netns", pair[0], "type", "veth", "peer", "name", _INTERFACE, "netns", pair[1])
    run(["ip", "link", "add", _INTERFACE, *ends])
    for index, name in enumerate(pair):
        run(["ip", "-n", name, "address", "add", f"{_address(index)}/30", "dev", _INTERFACE])
        for interface in ("lo", _INTERFACE):
            run(["ip", "-n", name, "link", "set", interface, "up"])
        if mbit is not None:
            run(["tc", "-n", name, *shaping(mbit)])


def shaping(mbit: float) -> list[str]:
    """`tc`'s arguments for a token bucket filter of this rate.

    The burst is small beside any tensor; what waits longer than the latency would be dropped, which nothing does: TCP
    keeps less under way than 200 ms hold.
    """
    return ["qdisc", "add", "dev", _INTERFACE, "root", *f"tbf rate {mbit:g}mbit burst 128kb latency 200ms".split()]


def _address(index: int) -> str:
    return f"10.231.0.{index + 1}"


def _host(name: str, main_address: str) -> Host:
    return Host(
        prefix=[_program("ip"), "netns", "exec", name],
        environment={"GLOO_SOCKET_IFNAME": _INTERFACE, "MASTER_ADDR": main_address},
    )


def _remove(name: str, run: Run) -> None:
    run(["ip", "netns", "del", name])


def _remove_stale(run: Run) -> None:
    """Remove the namespaces of processes that were killed before they could."""
    for found in _NAME.finditer(run(["ip", "netns", "list"])):
        if not Path("/proc", found[1]).exists():
            _remove(found[0], run)
