"""Plans that keep what they gather until the backward: found where there is memory and it is worth it, else not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_autoparallel import AutoParallelStrategy
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.lightning_compat import LightningModule
from lightning_autoparallel.pipeline import solved_plans
from lightning_autoparallel.strategy.planning import plan

WIDTH, BLOCKS, RANKS = 2048, 8, 16  # on two nodes
KEEPS = "plan auto: what is gathered for the forward stays so until the backward has read it"
WEIGHTS_GIB = WIDTH**2 * BLOCKS * 4 / 2**30


class Blocks(LightningModule):
    """Few rows: a step mostly gathers weights, and reduces their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS)))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.blocks(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def planned(rows: int = 1, **options: Any) -> Any:
    """With so many rows on each rank."""
    with torch.device("meta"):
        module = Blocks()
    batch, mesh = torch.zeros(RANKS * rows, WIDTH), {"dp_shard": RANKS}
    return plan(module, batch, mesh=mesh, world_size=RANKS, hardware="h100", precision="bf16-mixed", **options)


def gathers(report: Any, half: str) -> int:
    return sum(each.count for each in report.collectives[half].get("all_gather", {}).values())


def test_what_fits_and_pays_is_kept(tmp_path: Path) -> None:
    report = planned(dump_dir=str(tmp_path))
    assert KEEPS in report.notes
    assert gathers(report, "forward") and not gathers(report, "backward")
    path = tmp_path / "training_step" / "plan.json"
    assert json.loads(path.read_text())["keeps_gathered"] is True
    again = planned(plan=str(path))
    assert not gathers(again, "backward")
    assert gathers(planned(plan=str(path), reshard_after_forward=True, dump_dir=str(tmp_path / "again")), "backward")
    dumped = tmp_path / "again" / "training_step" / "plan.json"
    assert json.loads(dumped.read_text())["keeps_gathered"] is False  # what was done


def test_a_file_of_a_plan_that_was_told_to_keep_says_so(tmp_path: Path) -> None:
    assert not gathers(planned(plan="fsdp", reshard_after_forward=False, dump_dir=str(tmp_path)), "backward")
    again = planned(plan=str(tmp_path / "training_step" / "plan.json"))
    assert gathers(again, "forward") and not gathers(again, "backward")


@pytest.mark.parametrize(
    "options",
    [{"memory_budget_gib": 1.2 * WEIGHTS_GIB}, {"reshard_after_forward": True}, {"plan": "fsdp"}],
    ids=["no room", "as told", "another plan"],
)
def test_else_it_is_gathered_again(options: dict[str, Any]) -> None:
    report = planned(**options)
    assert KEEPS not in report.notes
    assert gathers(report, "forward") and gathers(report, "backward")


@pytest.mark.parametrize(("rows", "solved"), [(1, [True, False]), (2**14, [True])])
def test_it_is_looked_for_where_something_is_exposed(
    rows: int, solved: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[bool] = []
    make_plans = solved_plans.make_plans

    def made(*arguments: Any, gathered_again: bool, **options: Any) -> Any:
        again.append(gathered_again)
        return make_plans(*arguments, gathered_again=gathered_again, **options)

    monkeypatch.setattr(solved_plans, "make_plans", made)
    planned(rows)
    assert again == solved


def test_other_words_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"reshard_after_forward='never': write true, false, or 'auto'"):
        AutoParallelStrategy(mesh={"dp_shard": 2}, reshard_after_forward="never")  # type: ignore[arg-type]
