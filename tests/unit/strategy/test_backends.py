"""What is said of ``process_group_backend`` before any process waits for another."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_autoparallel import AutoParallelStrategy
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.strategy.backends import check_backend_on
from lightning_autoparallel.torch_compat.default_world import backend_of
from tests.distributed.jobs import make_trainer


@pytest.mark.parametrize("backend", [None, "gloo", "nccl", "GLOO", "cpu:gloo", "cpu:gloo,cuda:nccl"])
def test_known_ones_are_taken(backend):
    assert AutoParallelStrategy(process_group_backend=backend).process_group_backend == backend


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("glo", "'glo' is no backend.*did you mean 'gloo'"),
        ("cpu:gloo,cuda:ncl", "'ncl' is no backend.*did you mean 'nccl'"),
        ("gloo,nccl", "written with a type of device each"),
        ("cpu:gloo,cpu:gloo", "every type once"),
        (":gloo", "a type of device each"),
        ("", "'' is no backend"),
    ],
)
def test_unknown_ones_are_refused_at_once(backend, said):
    with pytest.raises(ConfigError, match=said):
        AutoParallelStrategy(process_group_backend=backend)


def test_none_for_the_device_of_the_training():
    with pytest.raises(ConfigError, match=r"has none for cpu.*add 'cpu:gloo'"):
        check_backend_on("cuda:gloo", "cpu")


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_one_that_torch_was_built_without():
    with pytest.raises(ConfigError, match="built without nccl"):
        check_backend_on("cpu:gloo,cuda:nccl", "cpu")


def test_a_backend_for_each_device_trains(tmp_path):
    with mock.patch.dict(os.environ):
        strategy = AutoParallelStrategy(process_group_backend="cpu:gloo", compile=False)
        trainer = make_trainer(strategy, 1, max_steps=1, limit_val_batches=0, default_root_dir=tmp_path)
        try:
            trainer.fit(BoringModel())
            assert (backend_of("cpu"), backend_of("cuda")) == ("gloo", None)
            assert strategy.mesh.backend == "gloo"
        finally:
            dist.destroy_process_group()
