"""PeakMemoryMonitor: what it measures, on which device, and how it says so."""

import csv
import mmap
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from lightning_autoparallel.callbacks import PeakMemoryMonitor, peak_memory
from lightning_autoparallel.callbacks.peak_memory import MemoryProbe, memory_probe

METRIC, PREDICTED = "autoparallel/peak_memory_bytes", "autoparallel/predicted_peak_memory_bytes"
CPU = torch.device("cpu")


class _Peaks(Callback):
    """Replaces the monitor's probe by one that gives these peaks in turn, and counts its resets."""

    def __init__(self, monitor, peaks):
        self.monitor, self.peaks, self.resets = monitor, iter(peaks), 0

    def on_train_start(self, trainer, pl_module):
        self.monitor._probe = MemoryProbe(label="by hand", reset=self._reset, peak_bytes=lambda: next(self.peaks))

    def _reset(self):
        self.resets += 1


def test_peaks_are_logged_exactly_at_the_trainers_cadence(run):
    monitor = PeakMemoryMonitor()
    peaks = _Peaks(monitor, [2**40 + 1, 7, 5, 6])
    trainer = run(monitor, peaks)
    with open(f"{trainer.logger.log_dir}/metrics.csv", newline="") as file:
        logged = [(row["step"], int(float(row[METRIC]))) for row in csv.DictReader(file)]
    assert logged == [("1", 2**40 + 1), ("3", 6)]
    assert int(trainer.logged_metrics[METRIC]) == int(trainer.callback_metrics[METRIC]) == 6
    assert peaks.resets == 4


def test_one_table_shows_the_first_epochs_peak_beside_the_predicted_one(run, reporting, capsys):
    monitor = PeakMemoryMonitor()
    run(monitor, _Peaks(monitor, [3 * 2**20, *[2**20] * 3, *[2**30] * 4]), strategy=reporting(peak=5 * 2**20), epochs=2)
    out = capsys.readouterr().out
    assert out.count("Peak memory of training steps") == 1
    rows = [line.split() for line in out.splitlines() if "MiB" in line]
    assert rows == [["measured:", "by", "hand", "3.0", "MiB"], ["predicted", "5.0", "MiB"]]


def test_the_predicted_peak_is_logged_and_named_beside_the_measured_one(run, reporting, capsys):
    monitor = PeakMemoryMonitor()
    trainer = run(monitor, _Peaks(monitor, [7, 8, 9, 6]), strategy=reporting(peak=2**40 + 3))
    with open(f"{trainer.logger.log_dir}/metrics.csv", newline="") as file:
        logged = [(int(float(row[METRIC])), int(float(row[PREDICTED]))) for row in csv.DictReader(file)]
    assert logged == [(8, 2**40 + 3), (9, 2**40 + 3)]
    assert "predicted: all alive but parameter shards and optimizer state" in capsys.readouterr().out


def test_nothing_is_logged_as_predicted_where_nothing_is(run, reporting):
    monitor = PeakMemoryMonitor()
    trainer = run(monitor, _Peaks(monitor, [7, 8, 9, 6]), strategy=reporting(peak=None))
    assert METRIC in trainer.logged_metrics
    assert PREDICTED not in trainer.logged_metrics


def test_any_strategy_will_do(run, capsys):
    monitor = PeakMemoryMonitor()
    trainer = run(monitor, strategy="auto")
    out = capsys.readouterr().out
    assert f"measured: {monitor.label}" in out
    assert "predicted" not in out
    assert float(trainer.logged_metrics[METRIC]) > 2**20


def test_ranks_are_compared_only_where_the_trainer_logs(run, monkeypatch, capsys):
    compared = []
    monkeypatch.setattr(
        peak_memory, "_max_over_ranks", lambda size_bytes, trainer: compared.append(size_bytes) or 2**30
    )
    monitor = PeakMemoryMonitor()
    trainer = run(monitor, _Peaks(monitor, [4, 3, 2, 1, 9, 9, 9, 9]), epochs=2)
    assert compared == [4, 2, 4, 9, 9]  # steps 2 and 4, the end of the first epoch, steps 6 and 8
    assert float(trainer.logged_metrics[METRIC]) == 2**30
    assert "1.0 GiB" in capsys.readouterr().out


def test_the_largest_of_all_ranks_counts(monkeypatch):
    def all_reduce(tensor, op):
        assert op == dist.ReduceOp.MAX
        tensor.fill_(max(2**40 + 1, int(tensor)))

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    trainer = SimpleNamespace(world_size=2, strategy=SimpleNamespace(root_device=CPU))
    assert peak_memory._max_over_ranks(5, trainer) == 2**40 + 1
    assert peak_memory._max_over_ranks(2**41, trainer) == 2**41


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the process peak cannot be reset here")
def test_the_process_peak_is_per_step():
    probe = memory_probe(CPU)
    assert probe.label == "process peak per step"
    probe.reset()  # other tests of this process may have taken more
    before = probe.peak_bytes()
    with mmap.mmap(-1, 64 << 20) as block:  # a heap may still hold as much that was freed, and give that
        block[:: mmap.PAGESIZE] = b"1" * (len(block) // mmap.PAGESIZE)
        during = probe.peak_bytes()
    probe.reset()
    assert during - before > 60 << 20
    assert during - probe.peak_bytes() > 60 << 20


@pytest.mark.parametrize("missing", ["_CLEAR_REFS", "_STATUS"])
def test_without_proc_the_peak_is_since_start(monkeypatch, tmp_path, missing):
    monkeypatch.setattr(peak_memory, missing, tmp_path / "missing" / "file")
    _check_since_start()


def test_without_permission_the_peak_is_since_start(monkeypatch):
    def refuse():
        raise PermissionError("read-only file system")

    monkeypatch.setattr(peak_memory, "_reset_process_peak", refuse)
    _check_since_start()


def test_without_a_peak_in_proc_it_is_since_start(monkeypatch, tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmRSS:\t  100 kB\n")
    monkeypatch.setattr(peak_memory, "_STATUS", status)
    monkeypatch.setattr(peak_memory, "_CLEAR_REFS", tmp_path / "clear_refs")
    _check_since_start()


def _check_since_start():
    probe = memory_probe(CPU)
    assert probe.label == "process peak since start"
    before = probe.peak_bytes()
    probe.reset()
    assert probe.peak_bytes() >= before > 2**20


def test_cuda_is_asked_for_its_allocators_peak(monkeypatch):
    calls = []
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(device))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 123 + device.index)
    probe = memory_probe(device)
    probe.reset()
    assert (probe.label, probe.peak_bytes(), calls) == ("allocator peak per step", 124, [device])
