"""The table of devices: what it holds, refuses, and how recipes change it."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_autoparallel.cost import HARDWARE, hardware_from, hardware_named
from lightning_autoparallel.errors import ConfigError

NAMES = ("cpu", "a100-80gb", "h100", "h100-96gb-500w", "h200", "b200", "mi300x")


def test_the_table():
    assert tuple(HARDWARE) == NAMES
    for name, spec in HARDWARE.items():
        assert spec.name == name
        assert spec.matmul_fraction <= 0.75 and spec.attention_fraction <= 0.75
        assert spec.intra_node.bandwidth_gb_per_s > spec.inter_node.bandwidth_gb_per_s
        assert spec.as_json()["peak_tflops"]["bfloat16"] == spec.peak_of(torch.bfloat16)


def test_nothing_in_it_can_be_changed():
    with pytest.raises(TypeError):
        HARDWARE["mine"] = HARDWARE["h100"]  # type: ignore[index]
    with pytest.raises(TypeError):
        HARDWARE["h100"].peak_tflops["bfloat16"] = 1.0  # type: ignore[index]


def test_measured_rates_replace_those_of_the_base():
    spec = hardware_from(
        {
            "base": "h100",
            "matmul_fraction": 0.6,
            "intra_node": {"bandwidth_gb_per_s": 300.0},
            "peak_tflops": {"int8": 1979.0},
        }
    )
    assert (spec.name, spec.matmul_fraction) == ("h100 with other rates", 0.6)
    assert (spec.intra_node.bandwidth_gb_per_s, spec.intra_node.latency_us) == (300.0, 1.9)
    assert (spec.peak_of(torch.int8), spec.peak_of(torch.bfloat16)) == (1979.0, 989.4)
    assert spec.memory_gb_per_s == hardware_named("h100").memory_gb_per_s
    assert hardware_from("h200") is hardware_from(hardware_from({"base": "h200"}).name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("h10", "did you mean 'h100'"),
        ("no/such/rates.yaml", "no/such/rates.yaml cannot be read"),
        ({"matmul_fraction": 0.6}, "with a base"),
        ({"base": "h100", "matmul_fractoin": 0.6}, "did you mean 'matmul_fraction'"),
        ({"base": "h100", "matmul_fraction": 0.8}, "at most 0.75"),
        ({"base": "h100", "memory_gb_per_s": -1}, "positive"),
        ({"base": "h100", "intra_node": 300}, "must be a mapping"),
        ({"base": "h100", "intra_node": {"bandwidth": 300}}, "bandwidth_gb_per_s"),
        (
            {"base": "h100", "matmul_fraction": "0.5"},
            "matmul_fraction is '0.5', but must be a number above 0 and at most",
        ),
        ({"base": "h100", "memory_fraction": True}, "memory_fraction is True, but must be a number above 0"),
        ({"base": "h100", "memory_gb_per_s": None}, "memory_gb_per_s is None, but must be a positive number"),
        ({"base": "h100", "memory_gb_per_s": math.inf}, "memory_gb_per_s is inf, but must be a positive number"),
        ({"base": "h100", "kernel_latency_us": "2"}, "kernel_latency_us is '2', but must be a number, 0 or more"),
        ({"base": "h100", "peak_tflops": {"bfloat16": "x"}}, "peak_tflops of bfloat16 is 'x', but must be a positive"),
        (
            {"base": "h100", "intra_node": {"bandwidth_gb_per_s": "3e2"}},
            "bandwidth_gb_per_s is '3e2', but must be a pos",
        ),
        ({"base": "h100", "inter_node": {"latency_us": None}}, "latency_us is None, but must be a number, 0 or more"),
        ({"base": "h100", "backend": "mpi"}, "backend is 'mpi', but must be one of nccl, gloo"),
        ({"base": "h100", "ranks_per_node": 2.5}, "ranks_per_node is 2.5, but must be a positive whole number"),
    ],
)
def test_what_cannot_be_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        hardware_from(given)


def test_an_unknown_peak_is_an_error():
    with pytest.raises(ConfigError, match="no peak for matrix products in complex64"):
        hardware_named("h100").peak_of(torch.complex64)
    measured = hardware_from({"base": "cpu", "is_measured": True, "peak_tflops": {"float32": 0.1}})
    with pytest.raises(ConfigError, match=r"in float16: write one .* or measure it: `calibrate --dtypes` with float1"):
        measured.peak_of(torch.float16)
    with pytest.raises(ConfigError, match=r"in complex64: write one into its file of rates, under peak_tflops; known"):
        measured.peak_of(torch.complex64)
    with pytest.raises(ConfigError, match="no peak for matrix products in float32"):
        hardware_from({"base": "cpu", "is_measured": True}).rated_dtype(torch.float32)
    named = hardware_from({"base": "cpu", "is_measured": True, "peak_tflops": {"tf32": 0.1, "float16": 0.2}})
    assert named.rated_dtype(torch.float32) == torch.float16, "the other is no dtype of torch's"
