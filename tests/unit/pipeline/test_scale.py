"""LLaMA-3 8B on 64 ranks, planned in one process: each parameter gathered once and its gradient reduced once."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import pytest

from tests.numerics.scale import plan_llama3_8b


def test_every_parameter_is_gathered_and_reduced_once():
    ranks = 64
    report, shapes = plan_llama3_8b(layers=4, ranks=ranks)
    assert len(shapes) == 39
    forward, backward = report.collectives["forward"], report.collectives["backward"]
    assert forward["all_gather"]["dp_shard"].count == 39
    assert backward["reduce_scatter"]["dp_shard"].count == 39
    # The loss's sum and its count of targets; the last layer's weight is still there when the backward starts.
    assert forward.keys() == {"all_gather", "all_reduce"}
    assert forward["all_reduce"]["dp_shard"].count == 2
    assert backward.keys() == {"all_gather", "reduce_scatter"}
    assert backward["all_gather"]["dp_shard"].count <= 39
    assert report.parameters_bytes == 4 * sum(math.ceil(shape[0] / ranks) * math.prod(shape[1:]) for shape in shapes)


@pytest.mark.matrix
def test_all_32_layers_fit_in_6_gib_of_host_memory():
    command = [sys.executable, "-m", "tests.numerics.scale", "32", "64"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "'all_gather': {'dp_shard': 291}" in printed
    assert "'reduce_scatter': {'dp_shard': 291}" in printed
    memory = re.search(r"peak host memory ([\d.]+) GiB", printed)
    assert memory is not None and float(memory[1]) < 6
