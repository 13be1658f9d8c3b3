"""The slow link without training: what is set up and removed, when it is skipped, and what the figures say."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from lightning_autoparallel.cli.bench.batch_clock import sent_bytes
from lightning_autoparallel.cli.bench.contenders import WITHOUT_ALL
from lightning_autoparallel.cli.bench.measurements import OURS, Contender, Measurement, Runs
from lightning_autoparallel.cli.bench.processes import Host, run_ranks
from lightning_autoparallel.cost import hardware_from
from lightning_autoparallel.passes import all_passes
from tests.benchmarks import slow_link as program
from tests.benchmarks.namespaces import NotAllowedError, call, names, shaping, slow_link

MEASURED = Measurement(
    step_ms=1000.0, launches=8, peak_bytes=0, startup_s=1.0, compile_s=None, losses=[4.0], sent_bytes=25e6, cpu_ms=300.0
)


class Machine:
    """Does as `ip` and `tc` would: keeps the namespaces, and refuses a command that begins with `refused`."""

    def __init__(self, *present: str, refused: str = "nothing") -> None:
        self.present, self.refused, self.commands = list(present), refused, []

    def __call__(self, command):
        self.commands.append(" ".join(command))
        if self.commands[-1].startswith(self.refused):
            raise NotAllowedError(f"{self.refused}: Operation not permitted")
        if command[:3] == ["ip", "netns", "add"]:
            self.present.append(command[3])
        if command[:3] == ["ip", "netns", "del"]:
            self.present.remove(command[3])
        return "".join(f"{name} (id: {index})\n" for index, name in enumerate(self.present))


def test_two_hosts_with_a_rate_on_both_ends_which_are_gone_afterwards():
    machine = Machine("mine")
    with slow_link(400, machine) as hosts:
        assert machine.present == ["mine", *names(os.getpid())]
        assert [host.prefix[-1] for host in hosts] == list(names(os.getpid()))
        assert len({host.environment["MASTER_ADDR"] for host in hosts}) == 1
    assert machine.present == ["mine"]
    shaped = [command for command in machine.commands if command.startswith("tc")]
    assert [command.split()[2] for command in shaped] == list(names(os.getpid()))
    assert all(command.endswith("tbf rate 400mbit burst 128kb latency 200ms") for command in shaped)


def test_no_limit_is_no_rate():
    machine = Machine()
    with slow_link(None, machine):
        pass
    assert not [command for command in machine.commands if command.startswith("tc")]


@pytest.mark.parametrize("refused", ["ip netns add", "ip link add", "ip -n", "tc -n"])
def test_what_was_made_before_a_refusal_is_removed(refused):
    machine = Machine(refused=refused)
    with pytest.raises(NotAllowedError, match="not permitted"), slow_link(400, machine):
        pytest.fail("the link is there")
    assert machine.present == []


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, ValueError])
def test_namespaces_are_removed_however_the_run_ends(end):
    machine = Machine()
    with pytest.raises(end), slow_link(400, machine):
        raise end
    assert machine.present == []


def test_those_of_dead_processes_are_removed_and_no_others():
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()
    others = [names(os.getppid())[0], "laptop", f"x{names(dead.pid)[0]}"]
    machine = Machine(*names(dead.pid), *others)
    with slow_link(400, machine):
        assert machine.present == [*others, *names(os.getpid())]


def test_the_status_says_that_it_was_skipped_and_the_message_why(monkeypatch, capsys):
    monkeypatch.setattr("tests.benchmarks.namespaces.shutil.which", lambda *_, **__: None)
    assert program.main([]) == program.SKIPPED
    assert capsys.readouterr().err == "skipped: ip (iproute2) is not installed\n"


def test_a_refused_command_is_quoted():
    with pytest.raises(NotAllowedError, match=r"`ls -d /no/such` failed: .*/no/such"):
        call(["ls", "-d", "/no/such"])


def test_ranks_run_on_the_hosts_in_turn(tmp_path):
    hosts = [Host(environment={"WHERE": where}) for where in "ab"]
    command = ["-c", "import os; print(os.environ['WHERE'], end='')"]
    run_ranks([sys.executable, "-S", *command], tmp_path, 4, 1, 60, [replace(hosts[0], prefix=["env"]), hosts[1]])
    assert [(tmp_path / f"rank{rank}.log").read_text() for rank in range(4)] == ["a", "a", "b", "b"]


COUNTERS = """Inter-|   Receive                            |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:  111 1 0 0 0 0 0 0 112 1 0 0 0 0 0 0
 link0: 221 2 0 0 0 0 0 0 223 2 0 0 0 0 0 0
"""


@pytest.mark.parametrize(("interface", "sent"), [("link0", 223), ("lo", 112), ("link", None), (None, None)])
def test_bytes_sent_by_one_interface(interface, sent):
    assert sent_bytes(interface, COUNTERS) == sent


def test_rows_hold_the_link_s_share():
    ours = Runs(contender=Contender(name=OURS), measured=[MEASURED])
    theirs = Runs(contender=Contender(name="fsdp2"), measured=[replace(MEASURED, step_ms=1500.0, sent_bytes=40e6)])
    failed = Runs(contender=Contender(name="ddp"), errors=["no"])
    limited = program.rows([ours, theirs, failed], 400)
    # 25 MB are 200 Mbit: half a second at 400 mbit/s
    assert limited[0][1:] == ["1000.0", "1000.0..1000.0", "1.00", "8", "25.0", "500.0", "500.0", "300.0", "0e+00"]
    assert limited[1][1:8] == ["1500.0", "1500.0..1500.0", "1.50", "8", "40.0", "800.0", "700.0"]
    assert limited[2] == ["ddp", *["-"] * 8, "failed"]
    assert program.rows([ours], None)[0][6:8] == ["-", "-"]
    assert {len(row) for row in limited} == {len(program.HEADER)}


def test_the_strategy_is_told_the_link_and_who_is_compared():
    arguments = program.parse(["--ranks", "4", "--mbit", "400"])
    hardware = hardware_from(program.config(arguments)["strategy"]["hardware"])
    # 400 mbit/s are 50 MB/s, which two ranks share
    assert {link.bandwidth_gb_per_s for link in (hardware.intra_node, hardware.inter_node)} == {0.025}
    ours, without, theirs = program.contenders(arguments)
    assert (ours.name, without.name, theirs.kind) == (OURS, WITHOUT_ALL, "fsdp2")
    assert set(without.overrides["disabled_passes"]) == {graph_pass.name for graph_pass in all_passes()}


@pytest.mark.parametrize("given", [["--ranks", "3"], ["--ranks", "0"], ["--dim", "100"], ["--mbit", "0"]])
def test_impossible_arguments_are_refused(given, capsys):
    with pytest.raises(SystemExit):
        program.parse(given)
    assert given[0] in capsys.readouterr().err


SEND = """
import os, socket, sys, time
size = 4_000_000
if os.environ["RANK"] == "1":
    with socket.create_server(("10.231.0.2", 5000)) as server, server.accept()[0] as peer:
        left = size
        while left:
            left -= len(peer.recv(1 << 16))
        peer.sendall(b"x")
else:
    for _ in range(600):
        try:
            peer = socket.create_connection(("10.231.0.2", 5000))
            break
        except OSError:
            time.sleep(0.1)
    start = time.monotonic()
    peer.sendall(bytes(size))
    peer.recv(1)
    print(time.monotonic() - start, open("/proc/net/dev").read(), sep=chr(10))
"""


def test_a_real_link_keeps_to_its_rate(tmp_path):
    try:
        with slow_link(400) as hosts:
            codes = run_ranks([sys.executable, "-S", "-c", SEND], tmp_path, 2, 1, 100, hosts)
    except NotAllowedError as reason:
        pytest.skip(str(reason))
    assert codes == [0, 0]
    elapsed_s, counters = (tmp_path / "rank0.log").read_text().split("\n", 1)
    # 4 MB are 80 ms; the first 128 kB may pass at once, and a busy machine is only slower
    assert float(elapsed_s) > 0.075
    assert 4e6 < (sent_bytes(hosts[0].environment["GLOO_SOCKET_IFNAME"], counters) or 0) < 5e6
    assert not set(names(os.getpid())) & set(call(["ip", "netns", "list"]).split())


def test_the_rate_is_written_as_tc_takes_it():
    assert "400mbit" in shaping(400.0)
    assert "0.5mbit" in shaping(0.5)
