"""What a Trainer's callbacks cannot do to a sharded model is refused before anything is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelPruning, StochasticWeightAveraging
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.strategy.lightning_tools import check_tools


def trainer(module: nn.Module, *callbacks: Callback) -> Any:
    strategy = SimpleNamespace(_layer_sync=None)
    return SimpleNamespace(callbacks=list(callbacks), loggers=[], lightning_module=module, strategy=strategy)


def pruning() -> ModelPruning:
    return ModelPruning("l1_unstructured", amount=0.3)


def test_pruning_alone_passes() -> None:
    check_tools(trainer(nn.Linear(2, 2), pruning()), has_rules=False)


@pytest.mark.parametrize("averaging", [EMAWeightAveraging(), StochasticWeightAveraging(swa_lrs=0.1)])
def test_pruning_beside_averages_is_refused(averaging: Callback) -> None:
    check_tools(trainer(nn.Linear(2, 2), averaging), has_rules=False)
    with pytest.raises(ConfigError, match=f"ModelPruning beside {type(averaging).__name__}: the averaged copy"):
        check_tools(trainer(nn.Linear(2, 2), pruning(), averaging), has_rules=False)


def test_pruning_of_shards_of_an_earlier_fit_is_refused(fake_mesh: Any) -> None:
    module = nn.Linear(2, 2)
    mesh = fake_mesh(dp_shard=2).device_mesh
    module.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()], run_check=False))
    check_tools(trainer(module), has_rules=False)
    with pytest.raises(ConfigError, match="leave_sharded=True was given"):
        check_tools(trainer(module, pruning()), has_rules=False)
