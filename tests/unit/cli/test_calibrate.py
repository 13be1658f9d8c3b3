"""What calibration makes of samples: rates that were known before, and predictions that meet them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_autoparallel.cli.calibrate import run_calibrate
from lightning_autoparallel.cli.calibrate.collective_times import collective_samples, late_share, overlap_samples
from lightning_autoparallel.cli.calibrate.fit import (
    causal_share,
    least_relative_squares,
    link_rates,
    operand_rates,
    overlap_pace,
    overlap_share,
    step_rates,
)
from lightning_autoparallel.cli.calibrate.kernel_times import _products, _update, kernel_samples
from lightning_autoparallel.cli.calibrate.measure import measure
from lightning_autoparallel.cli.calibrate.rates import kernel_time_us, rates_of, residuals, spread, with_steps
from lightning_autoparallel.cli.calibrate.samples import (
    CollectiveSample,
    KernelSample,
    OverlapSample,
    Samples,
    StepSample,
)
from lightning_autoparallel.cli.calibrate.stopwatch import Stopwatch
from lightning_autoparallel.config import MeshSpec
from lightning_autoparallel.contracts import PlanAxis
from lightning_autoparallel.cost import HARDWARE, GroupShape, HardwareSpec, LinkSpec, hardware_from
from lightning_autoparallel.cost.collective import collective_time_us
from lightning_autoparallel.cost.compute import computing_time_us
from lightning_autoparallel.cost.detect import entry_of, unlisted_gpu
from lightning_autoparallel.cost.links import COLLECTIVES
from lightning_autoparallel.errors import ConfigError

KINDS = {kind: LinkSpec(bandwidth_gb_per_s=2.0 + i, latency_us=30.0 + 10 * i) for i, kind in enumerate(COLLECTIVES)}
TRUE = replace(
    HARDWARE["cpu"],
    is_measured=True,
    peak_tflops={"float32": 0.05, "bfloat16": 0.2},
    attention_tflops={"float32": 0.02, "bfloat16": 0.03},
    matmul_fraction=1.0,
    memory_gb_per_s=10.0,
    memory_fraction=1.0,
    kernel_latency_us=5.0,
    launch_latency_us=15.0,
    intra_node=LinkSpec(bandwidth_gb_per_s=2.0, latency_us=30.0, kinds=KINDS),
    inter_node=LinkSpec(bandwidth_gb_per_s=0.25, latency_us=200.0),
    convolution_tflops={"float32": 0.07, "bfloat16": 0.09},
    attention_gb_per_s={"float32": 2.0},
    convolution_gb_per_s={"float32": 1.5, "bfloat16": 0.5},
    causal_share=0.8,
    optimizer_gb_per_s=4.0,
    overlap_share=0.4,
    overlap_pace=0.5,
    ranks_per_node=4,
)


def kernels(hardware: HardwareSpec) -> list[KernelSample]:
    """Samples that take exactly what the hardware's rates say."""
    works = [("memory", "float32", 2**power, 0) for power in (10, 18, 22)]
    works += [("optimizer", "float32", 7 * 2**20, 0)]
    for work in ("product", "attention", "convolution"):
        sizes = [(2**12, 10**7), (2**18, 10**8), (2**20, 10**8)]
        works += [(work, dtype, *size) for dtype in ("float32", "bfloat16") for size in sizes]
    untimed = [KernelSample(work=w, dtype=d, size_bytes=s, flops=f, time_us=0.0) for w, d, s, f in works]
    whole = [sample for sample in untimed if sample.work == "attention" and sample.flops == 10**8]
    untimed += [replace(sample, flops=sample.flops // 2, is_causal=True) for sample in whole]
    return [replace(sample, time_us=kernel_time_us(sample, hardware)) for sample in untimed]


def collectives(hardware: HardwareSpec, group: GroupShape) -> list[CollectiveSample]:
    return [
        CollectiveSample(
            kind=kind,
            axes="dp_shard",
            group=group,
            size_bytes=2**power,
            time_us=collective_time_us(kind, 2**power, group, hardware),
        )
        for kind in COLLECTIVES
        for power in (12, 16, 20, 24)
    ]


def beside(hardware: HardwareSpec, computing_us: float) -> OverlapSample:
    """A collective of 100 us and computing, both slowed down while both run, and alone after that."""
    together_us = computing_us / (1 - hardware.overlap_share * hardware.overlap_pace)
    left_us = 100.0 - together_us * hardware.overlap_pace
    both_us = together_us + left_us if left_us > 0 else computing_us + 100.0 * hardware.overlap_share
    return OverlapSample(communicating_us=100.0, computing_us=computing_us, both_us=both_us)


def samples_of(hardware: HardwareSpec, *groups: GroupShape) -> Samples:
    return Samples(
        kernels=kernels(hardware),
        collectives=[sample for group in groups for sample in collectives(hardware, group)],
        launch_us=hardware.launch_latency_us,
        longer=[beside(hardware, 300.0)],
        shorter=[beside(hardware, 50.0)],
    )


@pytest.mark.parametrize("groups", [(GroupShape(ranks=2),), (GroupShape(ranks=4),), (GroupShape(ranks=2),) * 2])
def test_known_rates_are_found(groups):
    rates = rates_of(samples_of(TRUE, *groups), "cpu", "mine", memory_bytes=10**9, ranks_per_node=4)
    found = hardware_from(yaml.safe_load(yaml.safe_dump(rates)))
    assert (found.name, found.is_measured, found.memory_bytes) == ("mine", True, 10**9)
    for kind in COLLECTIVES:
        expected = KINDS[kind]
        assert found.intra_node.of(kind).bandwidth_gb_per_s == pytest.approx(expected.bandwidth_gb_per_s, rel=1e-3)
        assert found.intra_node.of(kind).latency_us == pytest.approx(expected.latency_us, rel=1e-3)
    same = ("launch_latency_us", "kernel_latency_us", "memory_gb_per_s", "optimizer_gb_per_s")
    for key in (*same, "causal_share", "overlap_share", "overlap_pace"):
        assert getattr(found, key) == pytest.approx(getattr(TRUE, key), rel=1e-3)
    assert found.peak_tflops == pytest.approx(dict(TRUE.peak_tflops), rel=1e-3)
    assert found.attention_tflops == pytest.approx(dict(TRUE.attention_tflops), rel=1e-3)
    assert found.convolution_tflops == pytest.approx(dict(TRUE.convolution_tflops), rel=1e-3)
    assert found.attention_gb_per_s == pytest.approx(dict(TRUE.attention_gb_per_s), rel=1e-2)
    assert found.convolution_gb_per_s == pytest.approx(dict(TRUE.convolution_gb_per_s), rel=1e-2)
    assert found.inter_node == HARDWARE["cpu"].inter_node, "no group used it"
    ratios = [measured / predicted for *_, measured, predicted in residuals(samples_of(TRUE, *groups), found)]
    assert ratios == pytest.approx([1.0] * len(ratios), rel=2e-3)


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce", "all_to_all", "permute", "broadcast"])
def test_links_between_nodes(kind):
    group = GroupShape(ranks=4, nodes=4)
    found = link_rates([s for s in collectives(TRUE, group) if s.kind == kind and s.size_bytes > 2**18], 15.0)
    assert found == pytest.approx((0.25, 200.0), rel=1e-3)


def test_a_dtype_that_was_not_measured_has_no_rate():
    rates = rates_of(samples_of(TRUE, GroupShape(ranks=2)), "cpu", "mine", memory_bytes=1, ranks_per_node=2)
    with pytest.raises(ConfigError, match="no peak for matrix products in float16"):
        hardware_from(rates).peak_of(torch.float16)


def test_what_came_out_short_by_chance_counts_no_more_than_what_came_out_long():
    """Relative to what was measured, 500 us would count nine times as much as 1500: the fit would be 600."""
    rows = [(1.0, 0.0, 500.0), (1.0, 0.0, 1500.0)]
    assert least_relative_squares(rows) == pytest.approx((1000.0, 0.0))


def test_no_number_is_below_zero():
    """A time that falls with the size, by noise, has a latency only; one that is all bytes has no latency."""
    assert least_relative_squares([(1, 1, 10.0), (1, 2, 9.0)]) == pytest.approx((9.47, 0.0), rel=1e-2)
    assert least_relative_squares([(1, 1, 1.0), (1, 2, 3.0)])[0] == 0.0


@pytest.mark.parametrize(("both", "share"), [(300.0, 0.0), (290.0, 0.0), (350.0, 0.5), (420.0, 1.0)])
def test_overlap(both, share):
    longer = OverlapSample(communicating_us=100.0, computing_us=300.0, both_us=both)
    assert overlap_share([longer] * 3) == share


@pytest.mark.parametrize(("share", "pace"), [(0.0, 1.0), (0.0, 0.4), (0.5, 0.4), (0.5, 1.0), (1.0, 0.5)])
def test_the_pace_of_a_collective_beside_computing(share, pace):
    shorter = beside(replace(TRUE, overlap_share=share, overlap_pace=pace), 40.0)
    assert overlap_pace([shorter], share) == pytest.approx(pace)


def test_causal_attention_that_skips_nothing_takes_all_of_the_time():
    whole = KernelSample(work="attention", dtype="float32", size_bytes=8, flops=10, time_us=4.0)
    causal = replace(whole, flops=5, is_causal=True)
    assert [causal_share([whole, replace(causal, time_us=us)], {}) for us in (4.0, 3.0, 1.0)] == [1.0, 0.75, 0.5]


def test_operands_are_no_part_of_what_causal_attention_skips():
    """Of 4 us, 1 is the operands' (8 bytes at 8 bytes a us): 3 us with half of the pairs leave 2 of 3 for pairs."""
    whole = KernelSample(work="attention", dtype="float32", size_bytes=8, flops=10, time_us=4.0)
    causal = replace(whole, flops=5, is_causal=True, time_us=3.0)
    assert causal_share([whole, causal], {"float32": 0.008}) == pytest.approx(2 / 3)
    assert causal_share([whole, replace(causal, time_us=9.0)], {"float32": 0.003}) == 0.5, "they explain most of it"


@pytest.mark.parametrize(
    ("times_us", "expected"),
    [
        ((120.0, 220.0, 240.0), (1e-6, 1e-4)),  # 1 us a FLOP, and 10 us a byte
        ((100.0, 200.0, 200.0), (1e-6, None)),  # FLOPs alone
        ((20.0, 20.0, 40.0), (5e-6, None)),  # bytes alone: put down to FLOPs, by the median of their rates
        ((50.0, 60.0, 100.0), (2e-6, None)),  # 0.1 us a FLOP is a fifth of the longest: too little to tell
    ],
)
def test_what_operands_add_to_flops(times_us, expected):
    sizes = ((2, 100), (2, 200), (4, 200))
    samples = [
        KernelSample(work="attention", dtype="float32", size_bytes=size, flops=flops, time_us=time_us)
        for (size, flops), time_us in zip(sizes, times_us, strict=True)
    ]
    tflops, gb_per_s = operand_rates(samples, latency_us=1.0)
    assert tflops == pytest.approx(expected[0], rel=1e-3)
    assert gb_per_s == pytest.approx(expected[1], rel=1e-3) if expected[1] else gb_per_s is None


def test_rates_of_operands_are_told_where_there_are_any():
    """Plans kept in checkpoints ask for the text of the hardware: where nothing was measured it is as it was."""
    unmeasured = HARDWARE["h100"].as_json()
    assert "attention_gb_per_s" not in unmeasured and "attention_tflops" in unmeasured
    assert TRUE.as_json()["attention_gb_per_s"] == {"float32": 2.0}


def test_a_step_has_what_operands_add():
    """An attention of few FLOPs for each of its elements takes longer by what was measured of those."""
    cost = computing_time_us(1e6, 2000, torch.float32, "attention", TRUE, is_causal=False)
    assert cost == pytest.approx(1e6 / 0.02e6 + 2000 / 2e3)
    assert computing_time_us(1e6, 2000, torch.bfloat16, "attention", TRUE, is_causal=False) == pytest.approx(
        1e6 / 0.03e6
    )
    assert computing_time_us(1e6, 2000, torch.float32, "product", TRUE, is_causal=False) == pytest.approx(1e6 / 0.05e6)


@dataclass(frozen=True, kw_only=True)
class Scripted(Stopwatch):
    """A stopwatch that says what it is told to, in turns, and runs nothing."""

    says: Iterator[float]

    def time_us(self, run: Callable[[], object]) -> float:
        return 1.0

    def mean_us(self, run: Callable[[], object]) -> float:
        return next(self.says)


AXIS = PlanAxis(mesh_axes=("dp_shard",), size=2, rank=0, group_name="0")


@pytest.mark.parametrize(
    ("added_us", "share"),
    [([2450.0] * 9, 0.05), ([-10.0] * 9, 0.0), ([2450.0] * 7 + [-10.0] * 2, 0.0), ([49_000.0] * 9, 0.5)],
    ids=["told", "none", "rounds that differ", "at most"],
)
def test_what_ranks_wait_for_the_slowest_of_them(added_us, share):
    """An all-reduce of 500 us adds more behind 50 ms of computing than behind 1 ms, in nearly all rounds."""
    rounds = [(1000.0, 50_000.0, 50_500.0 + added, 1500.0) for added in added_us]
    clock = Scripted(device=torch.device("cpu"), says=itertools.chain(*rounds))
    assert late_share(clock, AXIS) == pytest.approx(share)


def test_what_ranks_wait_for_each_other_is_counted_where_they_compute():
    """Of 1000 us of computing 50 are waited for at the collective behind: 500 us of 1550 are its own."""
    says = itertools.cycle([1000.0, *[1550.0] * len(COLLECTIVES) * 4])
    clock = Scripted(device=torch.device("cpu"), says=says)
    found = list(collective_samples(clock, AXIS, GroupShape(ranks=2), late=0.05))
    assert len(found) == 4 * len(COLLECTIVES) and {sample.time_us for sample in found} == {500.0}


def test_computing_beside_a_collective_is_not_slowed_down_by_waiting():
    """2000 us of computing take 2100 where something is waited for behind them, whatever runs beside."""
    alone, both = [1550.0, 1000.0] * 5, [2000.0, 2100.0] * 5
    clock = Scripted(device=torch.device("cpu"), says=iter([*alone, *both]))
    found = overlap_samples(clock, AXIS, 1024, (4.0,), late=0.05)[4.0]
    assert [(one.communicating_us, one.computing_us, one.both_us) for one in found] == [(500.0, 2100.0, 2100.0)] * 5
    assert overlap_share(found) == 0.0


@pytest.mark.parametrize("late", [0.0, 0.25])
def test_kernels_take_as_long_as_where_ranks_wait_for_each_other(late, monkeypatch):
    """And collectives, and what runs beside them, are told the same share, to leave it out."""
    kernel = KernelSample(work="memory", dtype="float32", size_bytes=8, flops=0, time_us=100.0)
    told = []
    answers = {
        "build_mesh": lambda *args: SimpleNamespace(sizes={"dp_shard": 2}),
        "_axes": lambda mesh: [AXIS],
        "StageProgress": mock.MagicMock(),
        "kernel_samples": lambda *args: [kernel],
        "late_share": lambda *args: late,
        "collective_samples": lambda *args: told.append(args[-1]) or [],
        "overlap_samples": lambda *args: told.append(args[-1]) or {2.0: [], 0.5: []},
        "launch_time_us": lambda *args: 1.0,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(f"{measure.__module__}.{name}", answer)
    monkeypatch.setattr(Stopwatch, "slowest", lambda stopwatch, own_us: own_us)
    found = measure(MeshSpec.from_mapping({"dp_shard": 2}), "cpu", [torch.float32], ranks_per_node=2, spent_s=0.1)
    assert [sample.time_us for sample in found.kernels] == [100.0 * (1 + late)]
    assert told == [late, late] and found.late_share == late


def test_what_disturbs_for_a_while_disturbs_one_round_of_kernels():
    once = len(kernel_samples(Scripted(device=torch.device("cpu"), says=itertools.repeat(1.0)), [torch.float32]))
    says = itertools.chain([1.0] * once, [100.0] * once, [2.0] * once)
    found = kernel_samples(Scripted(device=torch.device("cpu"), says=says), [torch.float32])
    assert {sample.time_us for sample in found} == {2.0} and len(found) == once


class _Operands(TorchDispatchMode):
    """The addresses of what each product reads, and the names of all that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        if func is torch.ops.aten.mm.default:
            self.read += [operand.data_ptr() for operand in args]
        return func(*args, **(kwargs or {}))


class _Watched(Stopwatch):
    """Runs three times, and keeps what each run computed."""

    runs: ClassVar[list[_Operands]] = []

    def mean_us(self, run: Callable[[], object]) -> float:
        for _ in range(3):
            with _Operands() as operands:
                run()
            self.runs.append(operands)
        return 1.0


def test_products_find_none_of_their_operands_in_a_cache(monkeypatch):
    monkeypatch.setattr(_Watched, "runs", [])
    sample = _products(_Watched(device=torch.device("cpu")), 8, torch.float32, cold_bytes=2**20)
    first, second, third = (set(run.read) for run in _Watched.runs)
    assert len(first) == 3 and not first & second and not second & third and not first & third
    assert all(run.names.count("aten.mm.default") == 3 for run in _Watched.runs)
    assert sample.flops == 3 * 2 * 32 * 8 * 8 and sample.size_bytes == 3 * 4 * (2 * 32 * 8 + 8 * 8)


def test_updates_are_measured_as_trainings_make_them(monkeypatch):
    monkeypatch.setattr(_Watched, "runs", [])
    _update(_Watched(device=torch.device("cpu")), 8)
    assert all(
        "aten._foreach_sqrt.default" in run.names and "aten.sqrt.default" not in run.names for run in _Watched.runs
    )


def test_steps_beside_their_graphs():
    steps = [StepSample(parameters=n, time_us=10_000 + 50 * n + 7, graphs_us=7) for n in (2, 32)]
    assert step_rates(steps) == pytest.approx((10_000, 50))
    rates = rates_of(samples_of(TRUE, GroupShape(ranks=2)), "cpu", "mine", memory_bytes=1, ranks_per_node=2)
    found = hardware_from(with_steps(rates, steps))
    assert (found.step_latency_us, found.parameter_latency_us) == (10_000.0, 50.0)
    whole = [row for row in residuals(Samples(steps=steps), found) if row[0] == "step"]
    assert [measured for *_, measured, _ in whole] == pytest.approx([predicted for *_, predicted in whole])


def test_the_spread_of_ratios():
    assert spread([(2.0, 1.0), (1.0, 4.0), (1.0, 1.0)]) == pytest.approx((2.0, 4.0))
    assert math.isclose(spread([(1.0, 1.0)])[1], 1.0)


@pytest.mark.parametrize(
    ("device", "entry"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("T4", "x")],
)
def test_names_of_devices(device, entry, monkeypatch):
    assert entry_of(device, otherwise="x") == entry
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert unlisted_gpu() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    assert unlisted_gpu() == (device if entry == "x" else None)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--mesh", "dp_shard"], "is no JSON"),
        (["--mesh", "2"], "names no axes"),
        (["--dtypes", "float33"], "known are float32"),
        (["--mesh", '{"pp": 2}'], "pp"),
        (["--mesh", '{"dp_shard": 3}', "--processes", "2"], "needs 3 processes"),
    ],
    ids=str,
)
def test_mistakes_are_said_before_anything_is_started(args, message):
    with pytest.raises(ConfigError, match=message):
        run_calibrate(args)
