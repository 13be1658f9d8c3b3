"""Calls of modules draw what torch's generator says: the same again from a state that was restored or seeded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.jobs import Net, train
from tests.distributed.test_local_programs import caller, engine_of
from tests.numerics.training import full
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

WIDTH, ROWS = 32, 4
DATA, TENSOR = {"dp_shard": 2}, {"tp": 2}

Run = Callable[[], Tensor]


class Dropping(nn.Module):
    """What it gives for ones is twice what it keeps, and its weight's gradient the sum of that over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.weight, 0.5)


def made(mesh: Mapping[str, int], compile: bool = False) -> Any:
    """An engine, and a run of its module whose generators differ between ranks."""
    plan = {"base": "ddp", "rules": {"net.weight": {"tp": "S(0)"}}} if "tp" in mesh else "ddp"
    engine = engine_of(nn.ModuleDict({"net": Dropping()}), mesh, plan, compile)
    torch.manual_seed(dist.get_rank())
    return engine, partial(caller(engine), "net", torch.ones(ROWS, WIDTH))


def seeded(run: Run) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return torch.stack([run(), run()]).detach()


def check_restored(mesh: Mapping[str, int], alike: bool) -> None:
    """Masks follow the generator's state, whatever states the ranks are in."""
    _, run = made(mesh)
    before = torch.get_rng_state()
    first = [run().detach() for _ in range(3)]
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    again = [run().detach() for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), after)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
    later = run().detach()
    fixed = [seeded(run), seeded(run)]
    assert torch.equal(*fixed)
    for one, other in itertools.combinations([*first, later, *fixed[0]], 2):
        assert not torch.equal(one, other)
    for one in (*first, later, *fixed[0]):
        there: list[Any] = [None, None]
        dist.all_gather_object(there, one)
        assert torch.equal(*there) == alike


@pytest.mark.parametrize(("mesh", "alike"), [(DATA, False), (TENSOR, True)])
def test_a_state_that_comes_again_has_its_masks(mesh, alike: bool, worlds: Worlds) -> None:
    worlds(2).run(check_restored, mesh, alike)


def check_recomputed(mesh: Mapping[str, int], reentrant: bool, compile: bool) -> None:
    """The weight's gradient is the sum of what the forward kept, averaged over the batch shards."""
    engine, run = made(mesh, compile)
    call = caller(engine)
    for _ in range(3):
        engine.module.zero_grad()
        given = torch.ones(ROWS, WIDTH, requires_grad=True)
        kept = checkpoint(lambda x: call("net", x), given, use_reentrant=reentrant)
        run()  # another call in between
        kept.sum().backward()
        expected = kept.detach().sum(0)
        dist.all_reduce(expected)
        torch.testing.assert_close(full(engine.module["net"].weight.grad), expected / 2)
        torch.testing.assert_close(given.grad, kept.detach())


@pytest.mark.parametrize(
    ("mesh", "reentrant", "compile"),
    tiered(
        itertools.product([DATA, TENSOR], [False, True], [False, True]),
        lambda kind: not kind[2] or kind == (DATA, True, True),
    ),
)
def test_what_is_recomputed_draws_as_it_did(mesh, reentrant: bool, compile: bool, worlds: Worlds) -> None:
    worlds(2).run(check_recomputed, mesh, reentrant, compile)


def check_resumed() -> None:
    """A run that goes on from another's state draws on, whatever its own generators hold."""
    engine, run = made(DATA)
    for _ in range(3):
        run()
    state = engine.draws.state
    expected = [run().detach() for _ in range(2)]
    resumed, run = made(DATA)
    torch.manual_seed(11 + dist.get_rank())
    resumed.draws.state = state
    for value in expected:
        assert torch.equal(run().detach(), value)


def test_a_resumed_run_draws_on(worlds: Worlds) -> None:
    worlds(2).run(check_resumed)


def part_ways(mesh: Mapping[str, int]) -> list[str]:
    """One rank restores its generator, the other does not."""
    _, run = made(mesh)
    before = torch.get_rng_state()
    run()
    if dist.get_rank() == 0:
        torch.set_rng_state(before)
    raised = []
    for _ in range(2):
        try:
            run()
            raised.append("")
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}")
    return raised


def test_ranks_of_one_batch_shard_draw_alike_or_not_at_all(worlds: Worlds) -> None:
    for found in worlds(2).run(part_ways, TENSOR):
        assert found[0].startswith("CaptureError: step:net draws the random numbers of an earlier call again on one")
    for found in worlds(2).run(part_ways, DATA):
        assert found == ["", ""]


class Recomputed(Net):
    """Activation checkpointing of a step's own, around a captured module."""

    strategy: ClassVar = {"capture": "forward", "plan": "fsdp"}

    def __init__(self) -> None:
        super().__init__()
        self.net = Dropping()
        self.kept: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def batches(self) -> list[Any]:
        return [torch.ones(self.rows, WIDTH)] * self.steps

    def training_step(self, batch, batch_idx):
        kept = checkpoint(self.net, batch, use_reentrant=False)
        self.kept.append((kept.detach() != 0).float())
        return kept.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(full(self.net.weight.grad))

    def extra(self) -> Any:
        return self.kept, self.gradients


def test_checkpointing_in_a_step(worlds: Worlds) -> None:
    """Every step has its masks, and gradients that agree with them."""
    (kept, gradients), (others, _) = (found.extra for found in worlds(2).run(train, Recomputed, DATA))
    assert len(gradients) == Recomputed.steps
    for one, other, gradient in zip(kept, others, gradients, strict=True):
        torch.testing.assert_close(gradient, one.sum(0) + other.sum(0))
    for one, other in itertools.combinations([*kept, *others], 2):
        assert not torch.equal(one, other)
