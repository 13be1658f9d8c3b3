"""Dropout draws one mask for the whole batch: its own for each row, and one that tensor-parallel ranks share."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.distributed.jobs import Net, train
from tests.support.tiers import tiered
from tests.support.worlds import Worlds

MESH = {"dp_shard": 2, "tp": 2}
RATE = 0.25
STEPS, ROWS, LENGTH, WIDTH, HIDDEN = 5, 8, 8, 12, 16
CUT = {"up.*": {"tp": "S(0)"}, "down.weight": {"tp": "S(1)"}}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a rank drew, by step, and what it holds at the end of parameters that tp does not cut."""

    masks: list[tuple[Tensor, Tensor]]
    whole_over_tp: dict[str, Tensor]


class _Masks(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append((outputs["hidden"], outputs["out"]))


class Dropping(Net):
    """Dropout between two layers and after them; the step returns what was kept."""

    steps, rows = STEPS, ROWS

    def __init__(self) -> None:
        super().__init__()
        self.net = None
        self.up, self.down, self.head = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, 2)
        self.inside, self.after = nn.Dropout(RATE), nn.Dropout(RATE)
        self.masks = _Masks()

    def batches(self) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        return [
            (
                torch.randn(ROWS, LENGTH, WIDTH, generator=generator),
                torch.randn(ROWS, LENGTH, 2, generator=generator),
            )
            for _ in range(STEPS)
        ]

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.inside(torch.tanh(self.up(x)))
        out = self.after(self.down(hidden))
        loss = F.mse_loss(self.head(out), y)
        return {"loss": loss, "hidden": (hidden != 0).float(), "out": (out != 0).float()}

    def callbacks(self) -> list[Callback]:
        return [self.masks]

    def extra(self) -> Seen:
        whole = {name: p.to_local() for name, p in self.named_parameters() if _is_whole_over_tp(p)}
        return Seen(masks=self.masks.seen, whole_over_tp={name: p.detach().clone() for name, p in whole.items()})


def _is_whole_over_tp(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and parameter.placements[-1].is_replicate()


class _Given(nn.Module):
    """Drops what a mask says."""

    def __init__(self, masks: Sequence[Tensor]) -> None:
        super().__init__()
        self.masks = iter(masks)

    def forward(self, x):
        return x * next(self.masks) / (1 - RATE)


class Given(Dropping):
    """The same on one device, with the masks of the whole batch that the ranks drew."""

    drawn: ClassVar[list[tuple[Tensor, Tensor]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.inside = _Given([hidden for hidden, _ in self.drawn])
        self.after = _Given([out for _, out in self.drawn])

    def extra(self) -> None:
        return None


def _plan(**edges: str) -> Mapping[str, Any]:
    rules = {**CUT, **{f"outputs:{name}": {"tp": placement} for name, placement in edges.items()}}
    return {"plan": {"base": "fsdp", "rules": rules}}


class Whole(Dropping):
    """Both masks are whole on every tp rank."""

    strategy: ClassVar[Mapping[str, Any]] = {
        "plan": {
            "base": "fsdp",
            "rules": {"head.weight": {"tp": "S(1)"}, "outputs:inside": {"tp": "R"}, "outputs:after": {"tp": "R"}},
        }
    }


class ByColumn(Dropping):
    """Hidden values, and their mask with them, are cut by column."""

    strategy: ClassVar[Mapping[str, Any]] = _plan(after="R")


class ThenSequence(Dropping):
    """By column, then along the sequence."""

    strategy: ClassVar[Mapping[str, Any]] = _plan(after="S(1)")


class AlongTheSequence(Dropping):
    """Along the sequence twice; no weight is cut."""

    strategy: ClassVar[Mapping[str, Any]] = {
        "plan": {"base": "fsdp", "rules": {"outputs:inside": {"tp": "S(1)"}, "outputs:after": {"tp": "S(1)"}}}
    }


class Compiled(ThenSequence):
    strategy: ClassVar[Mapping[str, Any]] = {**ThenSequence.strategy, "compile": True}


@pytest.mark.parametrize(
    "kind", tiered([Whole, ByColumn, ThenSequence, AlongTheSequence, Compiled], (Whole, AlongTheSequence).__contains__)
)
def test_one_mask_for_the_whole_batch(kind: type[Dropping], worlds: Worlds) -> None:
    outcomes = worlds(4).run(train, kind, MESH, 4)
    seen: list[Seen] = [outcome.extra for outcome in outcomes]
    for one, other in ((0, 1), (2, 3)):  # ranks that share rows
        torch.testing.assert_close(seen[one].masks, seen[other].masks, rtol=0, atol=0)
        torch.testing.assert_close(seen[one].whole_over_tp, seen[other].whole_over_tp, rtol=0, atol=0)
        assert outcomes[one].losses == outcomes[other].losses
    drawn = [
        tuple(torch.cat(parts) for parts in zip(first, second, strict=True))
        for first, second in zip(seen[0].masks, seen[2].masks, strict=True)
    ]
    hidden, out = (torch.stack(masks) for masks in zip(*drawn, strict=True))
    assert hidden.shape == (STEPS, ROWS, LENGTH, HIDDEN) and out.shape == (STEPS, ROWS, LENGTH, WIDTH)
    for masks in (hidden, out):
        _assert_drawn_independently(masks)
    # And those masks are what forward and backward computed with.
    expected = train(type("Drawn", (Given,), {"drawn": drawn}), None)
    torch.testing.assert_close(outcomes[0].losses, expected.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(outcomes[0].parameters, expected.parameters, rtol=1e-5, atol=1e-6)


def _assert_drawn_independently(masks: Tensor) -> None:
    """`masks` (steps, rows, positions, channels): kept at the right rate, and no two parts are the same draw."""
    assert masks.unique().tolist() == [0, 1]
    spread = (RATE * (1 - RATE) / masks.numel()) ** 0.5
    assert abs(masks.mean().item() - (1 - RATE)) < 5 * spread
    for dim in range(masks.dim()):
        parts = masks.unbind(0) if dim == 0 else masks.chunk(2, dim)
        agree = RATE**2 + (1 - RATE) ** 2  # of independent draws
        for one, other in itertools.pairwise(parts):
            share = (one == other).float().mean().item()
            assert abs(share - agree) < 5 * (agree * (1 - agree) / one.numel()) ** 0.5, f"dim {dim}"
