"""The only table of devices and links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
import yaml

from lightning_autoparallel.cost.links import LinkSpec, check, mapping
from lightning_autoparallel.errors import ConfigError, did_you_mean

HIGHEST_FRACTION = 0.75  # of a datasheet's peak: no training step has been seen to sustain more
BACKENDS = ("nccl", "gloo")
_FILES = (".yaml", ".yml")
MEASURABLE = ("float32", "bfloat16", "float16", "float64")  # dtypes whose peaks `calibrate` may be asked for
_OF_OPERANDS = ("attention_gb_per_s", "convolution_gb_per_s")
_BY_DTYPE = ("peak_tflops", "attention_tflops", "convolution_tflops", *_OF_OPERANDS)

Work = Literal["product", "attention", "convolution"]


@dataclass(frozen=True, kw_only=True)
class HardwareSpec:
    """Peaks as datasheets give them, and the fractions of them that predictions assume.

    ``peak_tflops`` maps names of dtypes to dense matrix products' rates. ``matmul_fraction`` and ``attention_fraction``
    are of those, ``memory_fraction`` is of ``memory_gb_per_s``. Links are per rank, with what NCCL's protocols cost
    taken off already; ``launch_latency_us`` is what starting any collective costs beside its hops.

    Where they were measured: ``attention_tflops`` and ``convolution_tflops`` by dtype, in place of fractions, and
    ``attention_gb_per_s`` and ``convolution_gb_per_s``, at which what they read and write adds to that;
    ``causal_share``, of attention's pairs that causal attention computes, half of which are needed;
    ``optimizer_gb_per_s``, at which AdamW moves what it has to; ``overlap_share``, how much of the time of a collective
    is lost by what computes beside it, and ``overlap_pace``, at which the collective goes on meanwhile, 1 as alone;
    ``step_latency_us``, what a training step takes on the host beside its graphs, and ``parameter_latency_us``, what
    each of its parameters adds. ``reserved_share`` is what the allocator holds beyond what is alive, as a share of
    that; None where it is not known. ``backend`` is what process groups talk through there: ``nccl`` or ``gloo``;
    where there are real ones, theirs counts.

    ``is_measured`` says that rates are a clock's (``calibrate``), not a datasheet's: fractions may be 1 then.

    Raises:
        ConfigError: a rate is no positive number, a fraction is outside of its range, ``ranks_per_node`` is not whole,
            ``backend`` is not known.
    """

    name: str
    peak_tflops: Mapping[str, float]
    matmul_fraction: float
    attention_fraction: float
    memory_gb_per_s: float
    memory_fraction: float
    memory_bytes: int
    kernel_latency_us: float
    launch_latency_us: float
    intra_node: LinkSpec
    inter_node: LinkSpec
    ranks_per_node: int = 8
    step_latency_us: float | None = None
    parameter_latency_us: float | None = None
    attention_tflops: Mapping[str, float] = field(default_factory=dict)
    convolution_tflops: Mapping[str, float] = field(default_factory=dict)
    attention_gb_per_s: Mapping[str, float] = field(default_factory=dict)
    convolution_gb_per_s: Mapping[str, float] = field(default_factory=dict)
    causal_share: float = 0.5
    optimizer_gb_per_s: float | None = None
    overlap_share: float = 0.0
    overlap_pace: float = 1.0
    reserved_share: float | None = None
    backend: str = "nccl"
    is_measured: bool = False

    def __post_init__(self) -> None:
        highest = 1 if self.is_measured else HIGHEST_FRACTION
        for key in ("matmul_fraction", "attention_fraction"):
            wanted = f"a number above 0 and at most {highest}"
            check(key, getattr(self, key), lambda value: 0 < value <= highest, wanted)
        check("overlap_share", self.overlap_share, lambda value: 0 <= value <= 1, "a number from 0 to 1")
        if self.reserved_share is not None:
            check("reserved_share", self.reserved_share, lambda value: 0 <= value <= 1, "a number from 0 to 1")
        wanted = "a number above 0 and at most 1"
        for key in ("memory_fraction", "causal_share", "overlap_pace"):
            check(key, getattr(self, key), lambda value: 0 < value <= 1, wanted)
        given = ["optimizer_gb_per_s"] if self.optimizer_gb_per_s is not None else []
        for key in ("memory_gb_per_s", "memory_bytes", *given):
            check(key, getattr(self, key), lambda value: value > 0, "a positive number")
        is_count = isinstance(self.ranks_per_node, int)
        check("ranks_per_node", self.ranks_per_node, lambda value: is_count and value > 0, "a positive whole number")
        measured = [key for key in ("step_latency_us", "parameter_latency_us") if getattr(self, key) is not None]
        for key in ("kernel_latency_us", "launch_latency_us", *measured):
            check(key, getattr(self, key), lambda value: value >= 0, "a number, 0 or more")
        for key in _BY_DTYPE:
            for dtype, rate in getattr(self, key).items():
                check(f"{key} of {dtype}", rate, lambda value: value > 0, "a positive number")
        if self.backend not in BACKENDS:
            raise ConfigError(f"hardware: backend is {self.backend!r}, but must be one of {', '.join(BACKENDS)}")

    def reserved_bytes(self, alive_bytes: float) -> float:
        """What the device's allocator holds where so many bytes are alive: as many, where no more is known."""
        return alive_bytes * (1 + (self.reserved_share or 0.0))

    def usable_bytes(self, reserved_bytes: float) -> float:
        """How many bytes may be alive where the allocator may hold so many."""
        return reserved_bytes / (1 + (self.reserved_share or 0.0))

    def peak_of(self, dtype: torch.dtype) -> float:
        """The datasheet's TFLOP/s of matrix products of this dtype.

        Raises:
            ConfigError: there is none in the table.
        """
        name = _name(dtype)
        if name not in self.peak_tflops:
            given = f"give one, as in {{base: {self.name}, peak_tflops: {{{name}: 100}}}}"
            if self.is_measured:
                given = "write one into its file of rates, under peak_tflops"
                given += f", or measure it: `calibrate --dtypes` with {name}" if name in MEASURABLE else ""
            raise ConfigError(
                f"hardware {self.name!r} has no peak for matrix products in {name}: {given}; known are "
                f"{', '.join(sorted(self.peak_tflops))}"
            )
        return self.peak_tflops[name]

    def rated_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype itself where there is a peak of it, else one to take it for: float32, or the slowest there is.

        Raises:
            ConfigError: there is no peak of any.
        """
        if _name(dtype) in self.peak_tflops:
            return dtype
        known = [name for name in sorted(self.peak_tflops, key=self.peak_tflops.__getitem__) if hasattr(torch, name)]
        if not known:
            self.peak_of(dtype)
        found: torch.dtype = getattr(torch, "float32" if "float32" in known else known[0])
        return found

    def achieved_tflops(self, dtype: torch.dtype, work: Work) -> float:
        """The TFLOP/s that predictions assume of such work; convolutions are as fast as products unless measured.

        Raises:
            ConfigError: there is no peak of this dtype in the table.
        """
        tables = {"attention": self.attention_tflops, "convolution": self.convolution_tflops}
        measured = tables.get(work, {}).get(_name(dtype))
        if measured is not None:
            return measured
        return self.peak_of(dtype) * (self.attention_fraction if work == "attention" else self.matmul_fraction)

    def operand_time_us(self, size_bytes: float, dtype: torch.dtype, work: Work) -> float:
        """Microseconds that so many bytes of operands and results add to what such work takes for its FLOPs.

        0 where no such rate was measured: then bytes count beside FLOPs, by the memory's bandwidth, not with them.
        """
        tables = {"attention": self.attention_gb_per_s, "convolution": self.convolution_gb_per_s}
        measured = tables.get(work, {}).get(_name(dtype))
        return 0.0 if measured is None else size_bytes / (measured * 1e3)

    def host_time_us(self, parameters: int) -> float | None:
        """What a training step with so many parameters takes beside its graphs and the optimizer's kernels.

        None where that was not measured.
        """
        if self.step_latency_us is None or self.parameter_latency_us is None:
            return None
        return self.step_latency_us + parameters * self.parameter_latency_us

    @property
    def achieved_gb_per_s(self) -> float:
        """The memory bandwidth that predictions assume."""
        return self.memory_gb_per_s * self.memory_fraction

    def copy_time_us(self, size_bytes: float) -> float:
        """Microseconds of a kernel that reads and writes so many bytes."""
        return max(2 * size_bytes / (self.achieved_gb_per_s * 1e3), self.kernel_latency_us)

    def as_json(self) -> dict[str, Any]:
        """All fields as numbers, strings and mappings; rates of operands only where there are any."""
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        own = {key: value for key, value in own.items() if value or key not in _OF_OPERANDS}
        links = {key: value.as_json() for key, value in own.items() if isinstance(value, LinkSpec)}
        tables = {key: dict(value) for key, value in own.items() if key in _BY_DTYPE}
        return {**own, **tables, **links}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _nvlink(bandwidth_gb_per_s: float) -> LinkSpec:
    # A hop of NCCL's LL128 protocol over NVLink: 1.9 us (NVIDIA/nccl src/graph/tuning.cc, table hwLat).
    return LinkSpec(bandwidth_gb_per_s=bandwidth_gb_per_s, latency_us=1.9)


def _network(bandwidth_gb_per_s: float) -> LinkSpec:
    # A hop of the same protocol over the network: 4.0 us (the same table).
    return LinkSpec(bandwidth_gb_per_s=bandwidth_gb_per_s, latency_us=4.0)


# Fractions are assumptions, in the range of what is published: fused attention reaches 73 % on A100 (230 TFLOP/s) and
# 34 % on H100 (335 TFLOP/s, forward and backward) with FlashAttention-2 (Dao 2023, arXiv:2307.08691, sec. 4.1), which
# torch's scaled_dot_product_attention calls; large matrix products reach more than whole models do, and copies more of
# the memory's bandwidth than kernels with reductions. Links: tests/unit/cost/test_collective.py has the published
# figures that these stay below.
_A100 = HardwareSpec(
    name="a100-80gb",
    # NVIDIA A100 datasheet (nvidia-a100-datasheet-nvidia-us-2188504), SXM4 80GB, without sparsity. torch multiplies
    # float32 without TF32 unless told otherwise.
    peak_tflops=MappingProxyType({"float64": 19.5, "float32": 19.5, "float16": 312.0, "bfloat16": 312.0}),
    matmul_fraction=0.7,
    attention_fraction=0.6,
    memory_gb_per_s=2039.0,  # the same datasheet
    memory_fraction=0.8,
    memory_bytes=80 * 10**9,
    kernel_latency_us=2.0,
    launch_latency_us=10.0,  # tuning.cc, table baseLat: ring, LL128
    # 12 NVLink 3 links, 300 GB/s in one direction (datasheet); NCCL reaches close to 240 (NVIDIA/nccl issue 1712).
    intra_node=_nvlink(220.0),
    # One HDR adapter of 200 Gb/s per GPU (DGX A100 datasheet): NCCL reaches 24 GB/s (NVIDIA/nccl-tests issue 160).
    inter_node=_network(22.0),
)
_H100 = HardwareSpec(
    name="h100",
    # NVIDIA H100 Tensor Core GPU datasheet, SXM5: half of the figures with sparsity.
    peak_tflops=MappingProxyType(
        {
            "float64": 67.0,
            "float32": 67.0,
            "float16": 989.4,
            "bfloat16": 989.4,
            "float8_e4m3fn": 1978.9,
            "float8_e5m2": 1978.9,
        }
    ),
    matmul_fraction=0.65,
    attention_fraction=0.35,
    memory_gb_per_s=3350.0,  # the same datasheet
    memory_fraction=0.8,
    memory_bytes=80 * 10**9,
    kernel_latency_us=2.0,
    launch_latency_us=10.0,
    # 18 NVLink 4 links, 450 GB/s in one direction (datasheet); NCCL reaches 370 (NVIDIA/nccl-tests issue 212).
    intra_node=_nvlink(340.0),
    # One NDR adapter of 400 Gb/s per GPU (DGX H100 datasheet): 46 to 48 GB/s (NVIDIA/nccl-tests issue 290).
    inter_node=_network(42.0),
)
# The machines of torchtitan's benchmarks of Llama 3.1 (2024-12 and 2025-06): H100, 96 GB of HBM2e, limited to 500 W.
# The fractions of matrix products and of attention, and the share that is reserved, are fitted to the times and the
# memory published there (`python -m tests.benchmarks.published`); compiled, with what optimizer and host take in them.
_H100_500W = replace(
    _H100,
    name="h100-96gb-500w",
    matmul_fraction=0.47,
    attention_fraction=0.255,
    memory_gb_per_s=2400.0,  # six stacks, of which the five of NVIDIA's H100 PCIe have 2.0 TB/s (datasheet)
    memory_bytes=96 * 10**9,
    reserved_share=0.13,
)
_H200 = replace(
    _H100,
    name="h200",
    # NVIDIA H200 Tensor Core GPU datasheet, SXM: the H100's rates with 141 GB at 4.8 TB/s.
    memory_gb_per_s=4800.0,
    memory_bytes=141 * 10**9,
)
_B200 = HardwareSpec(
    name="b200",
    # NVIDIA Blackwell architecture technical brief, HGX B200 at 1000 W, dense.
    peak_tflops=MappingProxyType(
        {
            "float64": 40.0,
            "float32": 80.0,
            "float16": 2250.0,
            "bfloat16": 2250.0,
            "float8_e4m3fn": 4500.0,
            "float8_e5m2": 4500.0,
        }
    ),
    matmul_fraction=0.65,
    attention_fraction=0.35,  # no published figure for torch's own kernels: as on H100
    memory_gb_per_s=8000.0,  # the same brief
    memory_fraction=0.8,
    memory_bytes=180 * 10**9,  # HGX B200 datasheet: 1.44 TB for eight
    kernel_latency_us=2.0,
    launch_latency_us=10.0,
    # 18 NVLink 5 links, 900 GB/s in one direction (brief); NCCL's own model takes 18 x 40.1 (NVIDIA/nccl issue 1807).
    intra_node=_nvlink(660.0),
    inter_node=_network(42.0),  # one adapter of 400 Gb/s per GPU (DGX B200 datasheet), as on H100
)
_MI300X = HardwareSpec(
    name="mi300x",
    # AMD Instinct MI300X data sheet, dense.
    peak_tflops=MappingProxyType(
        {
            "float64": 163.4,
            "float32": 163.4,
            "float16": 1307.4,
            "bfloat16": 1307.4,
            "float8_e4m3fn": 2614.9,
            "float8_e5m2": 2614.9,
        }
    ),
    matmul_fraction=0.5,
    attention_fraction=0.3,  # no published figure for torch's own kernels: below its matrix products
    memory_gb_per_s=5300.0,  # the same data sheet
    memory_fraction=0.75,
    memory_bytes=192 * 10**9,
    kernel_latency_us=3.0,
    launch_latency_us=10.0,
    # 7 links of 64 GB/s in one direction (data sheet), of which 48 are usable each (rocm.blogs.amd.com, "Understanding
    # RCCL Bandwidth and xGMI Performance on AMD Instinct MI300X", 2025): 336 GB/s to all peers together.
    intra_node=_nvlink(300.0),
    inter_node=_network(42.0),  # one adapter of 400 Gb/s per GPU, as on H100
)
_CPU = HardwareSpec(
    name="cpu",
    # One socket of an Intel Xeon Platinum 8480+ (ark.intel.com): 56 cores at 2.0 GHz; 64 FLOPs per core and cycle in
    # float32 with AVX-512, 2048 in bfloat16 with AMX.
    peak_tflops=MappingProxyType({"float64": 3.6, "float32": 7.2, "float16": 7.2, "bfloat16": 229.0}),
    matmul_fraction=0.5,
    attention_fraction=0.25,
    memory_gb_per_s=307.0,  # 8 channels of DDR5-4800
    memory_fraction=0.7,
    memory_bytes=256 * 10**9,
    kernel_latency_us=5.0,
    launch_latency_us=50.0,
    # gloo over TCP publishes no figures: these are orders of magnitude, of the loopback device and of 25 Gb/s Ethernet.
    intra_node=LinkSpec(bandwidth_gb_per_s=2.0, latency_us=30.0),
    inter_node=LinkSpec(bandwidth_gb_per_s=1.5, latency_us=60.0),
    backend="gloo",
)

HARDWARE: Mapping[str, HardwareSpec] = MappingProxyType(
    {spec.name: spec for spec in (_CPU, _A100, _H100, _H100_500W, _H200, _B200, _MI300X)}
)


def hardware_named(name: str) -> HardwareSpec:
    """The entry of ``HARDWARE``.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in HARDWARE:
        raise ConfigError(f"unknown hardware {name!r}: known are {', '.join(HARDWARE)}{did_you_mean(name, HARDWARE)}")
    return HARDWARE[name]


def hardware_from(given: str | Mapping[str, Any] | HardwareSpec) -> HardwareSpec:
    """Hardware as users write it: a name, or ``{"base": "h100", "matmul_fraction": 0.6, ...}`` with rates of its own.

    A link is a mapping of its own, of which some keys may be left out; so is ``peak_tflops``, unless ``is_measured``:
    then a dtype that was not measured has no rate. A name that ends in
    ``.yaml`` is that of a file with such a mapping, which ``calibrate`` writes.

    Raises:
        ConfigError: an unknown name or key, a value outside of its range, or a file that cannot be read.
    """
    if isinstance(given, HardwareSpec):
        return given
    if isinstance(given, str) and not given.endswith(_FILES):
        return hardware_named(given)
    if isinstance(given, str):
        given = _read(given)
    if not isinstance(given, Mapping) or "base" not in given:
        raise ConfigError(f"hardware is {given!r}: give a name, or a mapping with a base, like {{base: h100, ...}}")
    base = hardware_named(str(given["base"]))
    changes = {key: value for key, value in given.items() if key != "base"}
    rates = "measured rates" if changes.get("is_measured") else "other rates"
    changes.setdefault("name", f"{base.name} with {rates}" if changes else base.name)
    if changes.get("is_measured"):
        base = replace(base, peak_tflops=MappingProxyType({}))
    return replace(base, **{key: _changed(base, key, value) for key, value in changes.items()})


def _read(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return yaml.safe_load(file)
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"hardware: {path} cannot be read: {error}") from error


def _changed(base: HardwareSpec, key: str, value: Any) -> Any:
    known = [field.name for field in fields(base)]
    if key not in known:
        raise ConfigError(f"hardware has no key {key!r}: keys are {', '.join(known)}{did_you_mean(key, known)}")
    now = getattr(base, key)
    if isinstance(now, LinkSpec):
        return now.changed(key, value)
    if key in _BY_DTYPE:
        return MappingProxyType({**now, **mapping(key, value)})
    return value
