"""Whose line an error or a node is of."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import lightning_autoparallel
from lightning_autoparallel.capture import capture_step
from lightning_autoparallel.capture.data_dependence import data_dependent
from lightning_autoparallel.capture.sources import is_user_file, place_of
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.fx import nodes as fxn
from tests.unit._graphs import captured, request_of

SITE = Path(torch.__file__).parents[1]
STANDARD = Path(contextlib.__file__).parent
PACKAGE = Path(lightning_autoparallel.__file__).parent


@pytest.mark.parametrize(
    ("path", "is_users"),
    [
        (SITE / "torch" / "nn" / "functional.py", False),
        (SITE / "torchmetrics" / "metric.py", False),
        (SITE / "lightning" / "pytorch" / "trainer.py", False),
        (SITE / "torchvision" / "models" / "resnet.py", True),
        (SITE / "torch_geometric" / "nn.py", True),
        (SITE / "lightning_uq_box" / "model.py", True),
        (STANDARD / "contextlib.py", False),
        (STANDARD / "site-packages" / "timm" / "model.py", True),
        (Path(f"{STANDARD}-project") / "model.py", True),
        (PACKAGE / "capture" / "step.py", False),
        (PACKAGE / "models" / "llama3.py", True),
        (Path(f"{PACKAGE}_recipes") / "model.py", True),
    ],
    ids=str,
)
def test_whose_file(path: Path, is_users: bool):
    assert is_user_file(str(path)) == is_users


def library(folder: Path) -> object:
    """A module that reads values, installed in a folder of its own."""
    path = folder / "site-packages" / "checker" / "checks.py"
    path.parent.mkdir(parents=True)
    path.write_text("def check(x):\n    assert x.sum() > 0, 'negative'\n")
    spec = importlib.util.spec_from_file_location("checker.checks", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_librarys_check_is_not_the_users_to_rewrite(tmp_path):
    checks = library(tmp_path)

    def step(x):
        checks.check(x)
        return x.sum()

    with pytest.raises(CaptureError) as caught:
        captured(nn.Linear(4, 4), torch.ones(2, 4), step)
    line = inspect.getsourcelines(step)[1] + 1
    assert "checks.py:2 reads a tensor's value" in str(caught.value)
    assert f"in checker, called from {Path(__file__).name}:{line}: switch it off" in str(caught.value)
    assert "torch.where" not in str(caught.value)


def test_what_distributions_read_is_theirs():
    def step(x):
        return torch.distributions.VonMises(x, x.exp()).sample().sum() * x.sum()

    with pytest.raises(CaptureError, match=r"test_sources.py:\d+ reads a tensor's.*torch.distributions needs them"):
        captured(nn.Linear(4, 4), torch.ones(2, 4), step)


def test_a_module_of_torchs_that_runs_by_itself_is_where_its_line_is():
    with FakeTensorMode(), pytest.raises(DataDependentOutputException) as raised:
        norm = nn.BatchNorm1d(4, momentum=None)
        norm.num_batches_tracked = torch.empty((), dtype=torch.long)
        norm(torch.randn(2, 4))
    error = raised.value
    assert error.__traceback__ is not None and place_of(error) is not None
    error.__traceback__ = error.__traceback__.tb_next  # as the module's call alone is captured
    assert place_of(error) is None
    said = data_dependent(error, error)
    assert said.startswith("batchnorm.py:") and "num_batches_tracked" in said
    assert "the line is in torch.nn" in said


class ReadTwice(nn.Module):
    """A parameter whose gradient autograd adds up, which no line of the module's does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sin() + (x * self.weight).cos()


def test_what_no_line_of_a_module_does_is_of_the_line_that_calls_it():
    """As in forward mode, where torch's own modules are captured by themselves."""
    request = replace(request_of(nn.Linear(3, 3), torch.randn(4, 3)), run=torch.cat)
    for is_local, file in ((True, "test_sources.py"), (False, "None")):
        graph = capture_step(replace(request, local=is_local)).graph_module.graph
        lines = [fxn.custom(node, "source") for node in graph.nodes if node.op == "call_function"]
        assert [str(line).partition(":")[0] for line in lines] == [file]


def test_what_no_line_of_the_step_does_is_not_of_the_script_that_trains():
    graph = captured(ReadTwice(), torch.randn(4, 3)).graph_module.graph
    lines = {str(node.target): fxn.custom(node, "source") for node in graph.nodes if node.op == "call_function"}
    first = inspect.getsourcelines(ReadTwice.forward)[1] + 1
    assert lines["aten.sin.default"] == f"test_sources.py:{first}"
    summed = [node for node in graph.nodes if node.target is torch.ops.aten.add.Tensor]
    assert {fxn.custom(node, "source") for node in summed} == {f"test_sources.py:{first}", None}
