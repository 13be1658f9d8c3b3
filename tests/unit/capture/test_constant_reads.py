"""What torch's own Python reads of constants, checks and distributions is captured as one device computes it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

from lightning_autoparallel.plan import make_plan
from tests.unit._graphs import captured, run_captured

X, Y = torch.randn(6, 4), torch.randint(0, 4, (6,))
LINEAR = nn.Linear(4, 4)


def one_hot(x: Tensor, y: Tensor) -> Tensor:
    return (LINEAR(x) * F.one_hot(y, 4)).sum()


def off_diagonal(x: Tensor, y: Tensor) -> Tensor:
    scores = LINEAR(x) @ x.t()
    return scores[~torch.eye(len(x), dtype=torch.bool)].view(len(x), -1).square().sum()


def mixed_index(x: Tensor, y: Tensor) -> Tensor:
    kept = torch.arange(4) % 2 == 0
    scores = LINEAR(x).clone()
    scores[1:3, torch.tensor([True, False, False, True])] = 0.5
    return scores[:, kept].square().sum() + scores[..., ~kept].sum()


def lists(x: Tensor, y: Tensor) -> Tensor:
    (first, _), last = torch.arange(4).view(2, 2).add(1).tolist()
    return LINEAR(x).sum() * first + x.sum() * last[1]


def normal(x: Tensor, y: Tensor) -> Tensor:
    made = distributions.Normal(LINEAR(x), LINEAR(x).exp(), validate_args=True)
    prior = distributions.Normal(0.0, 1.0)
    return distributions.Independent(made, 1).log_prob(x).mean() + distributions.kl_divergence(made, prior).mean()


def categorical(x: Tensor, y: Tensor) -> Tensor:
    made = distributions.Categorical(logits=LINEAR(x))
    return made.entropy().mean() - made.expand((6,)).log_prob(y).mean()


def inferred(x: Tensor, y: Tensor) -> Tensor:
    with torch.inference_mode():
        target = LINEAR(x).softmax(-1)
    return F.mse_loss(LINEAR(x), target.clone())


STEPS = [one_hot, off_diagonal, mixed_index, lists, normal, categorical, inferred]


@pytest.mark.parametrize("step", STEPS)
def test_it_computes_what_torch_does(step):
    graph = captured(LINEAR, (X, Y), lambda batch: step(*batch))
    outputs = run_captured(graph, LINEAR, (X, Y))
    LINEAR.zero_grad()
    loss = step(X, Y)
    loss.backward()
    torch.testing.assert_close(outputs[("output", "0")], loss.detach())
    torch.testing.assert_close(outputs[("gradient", "weight")], LINEAR.weight.grad)


@pytest.mark.parametrize("step", [one_hot, off_diagonal, normal])
def test_it_can_be_planned(step, fake_mesh):
    graph = captured(LINEAR, (X, Y), lambda batch: step(*batch), shards=2)
    make_plan(graph, "fsdp", fake_mesh(dp_shard=2), print)


def test_unchecked_distributions_are_said(monkeypatch):
    # TorchDynamo's import of its patches switches the checks of the whole process off.
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)
    notices: list[str] = []
    captured(LINEAR, (X, Y), lambda batch: normal(*batch), notice=notices.append)
    assert "step makes a Normal, whose arguments are not checked at real steps" in notices[0]
    assert distributions.Normal(0.0, 1.0, validate_args=True)._validate_args
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        distributions.Normal(0.0, -1.0)
    notices.clear()

    def unchecked(batch: tuple[Tensor, Tensor]) -> Tensor:
        return distributions.Normal(LINEAR(batch[0]), 1.0, validate_args=False).mean.sum()

    captured(LINEAR, (X, Y), unchecked, notice=notices.append)
    assert not notices
