"""What `Trainer(precision=...)` means on one device is what it means on many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn

from tests.distributed.jobs import MESH, Losses, Net, make_strategy, make_trainer, train
from tests.numerics.training import full
from tests.support.worlds import Worlds

TWO_BY_TWO = {"dp_replicate": 2, "dp_shard": 2}


class Dtypes(Callback):
    """The dtypes of parameters, gradients and optimizer state at every optimizer step, and of what steps return."""

    def __init__(self) -> None:
        self.seen: dict[str, set[torch.dtype]] = {}

    def _add(self, kind: str, tensor: Tensor) -> None:
        self.seen.setdefault(kind, set()).add(tensor.dtype)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for parameter in pl_module.parameters():
            self._add("parameter", parameter)
            self._add("gradient", parameter.grad)
            for name, value in optimizer.state[parameter].items():
                if name != "step":
                    self._add("state", value)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._add("input", batch[0])
        self._add("loss", outputs["loss"])
        self._add("hidden", outputs["hidden"])
        self._add("made", outputs["made"])


class Mixed(Net):
    """A norm, an embedding and products: some in bfloat16, some not, and a tensor of the default dtype."""

    steps = 6
    trainer_options: ClassVar[Mapping[str, Any]] = {"precision": "bf16-mixed"}

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 12, bias=False), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 7, bias=False)
        )
        self.table = nn.Embedding(3, 6)
        self.dtypes = Dtypes()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x + self.table(y)), y)

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.net(x + self.table(y))
        made = torch.ones(3)
        loss = F.cross_entropy(hidden, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "hidden": hidden.amax(), "made": made.sum()}

    def configure_optimizers(self):
        # A large eps: otherwise the sign of a gradient that is nearly 0 decides about a whole step.
        return torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-1)

    def callbacks(self) -> list[Callback]:
        return [self.dtypes]

    def extra(self) -> Any:
        return self.dtypes.seen


class Half(Mixed):
    trainer_options: ClassVar[Mapping[str, Any]] = {"precision": "bf16-true"}


class MixedReplicated(Mixed):
    strategy: ClassVar[Mapping[str, Any]] = {"plan": "ddp"}


class MixedCompiled(Mixed):
    strategy: ClassVar[Mapping[str, Any]] = {"compile": True}


class MixedWithBiases(Mixed):
    """A bias is added before a product is rounded, as on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 7))


class HalfOnMeta(Half):
    """The network is made on meta, where it has no values yet when the Trainer converts it."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.net = nn.Sequential(
                nn.Linear(6, 12, bias=False), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 7, bias=False)
            )


class CachedCasts(Mixed):
    """Autocast of the step's own, which keeps its casts of weights for a second use."""

    trainer_options: ClassVar[Mapping[str, Any]] = {}

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.net(x + self.table(y)) + self.net(x)
        return {"loss": F.cross_entropy(hidden, y), "hidden": hidden.amax(), "made": hidden.mean()}


# bfloat16 keeps 8 bits of a value. Rows are computed alike everywhere, so that the first loss agrees; gradients are
# rounded on every rank before they are summed, which one device does once.
@pytest.mark.parametrize(
    ("kind", "mesh", "first", "tolerance"),
    [
        (Mixed, MESH, 1e-6, 2e-3),
        pytest.param(Mixed, TWO_BY_TWO, 1e-6, 2e-3, marks=pytest.mark.matrix),
        (MixedReplicated, MESH, 1e-6, 2e-3),
        (MixedWithBiases, MESH, 1e-6, 4e-3),
        pytest.param(MixedCompiled, MESH, 2e-3, 4e-3, marks=pytest.mark.matrix),  # Inductor rounds less often
        (CachedCasts, MESH, 1e-2, 1e-2),  # its loss is a bfloat16
        (Half, MESH, 1e-2, 2e-2),
        pytest.param(Half, TWO_BY_TWO, 1e-2, 2e-2, marks=pytest.mark.matrix),
    ],
)
def test_training_is_that_of_one_device(kind, mesh, first: float, tolerance: float, worlds: Worlds) -> None:
    expected = train(kind, None)
    world = 2 if mesh is MESH else 4
    for outcome in worlds(world).run(train, kind, mesh, world):
        assert outcome.losses[0] == pytest.approx(expected.losses[0], rel=first)
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=tolerance, atol=0)
        torch.testing.assert_close(outcome.parameters, expected.parameters, rtol=0, atol=tolerance)
        torch.testing.assert_close(outcome.metrics, expected.metrics, rtol=tolerance, atol=0)
        assert outcome.extra == expected.extra


def test_the_dtypes_that_were_compared(worlds: Worlds) -> None:
    float32, bfloat16 = {torch.float32}, {torch.bfloat16}
    whole = {"parameter": float32, "gradient": float32, "state": float32, "input": float32, "made": float32}
    assert train(Mixed, None).extra == {**whole, "loss": float32, "hidden": bfloat16}
    assert train(Half, None).extra == dict.fromkeys((*whole, "loss", "hidden"), bfloat16)


def meta_dtypes() -> dict[str, set[torch.dtype]]:
    return train(HalfOnMeta, MESH).extra


def test_a_module_on_meta_is_made_in_bfloat16(worlds: Worlds) -> None:
    for seen in worlds(2).run(meta_dtypes):
        assert set(seen) == {"parameter", "gradient", "state", "input", "made", "loss", "hidden"}
        assert set().union(*seen.values()) == {torch.bfloat16}


class Evaluates(Mixed):
    """The other steps of a LightningModule."""

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])


def evaluate(precision: str, mesh: Mapping[str, int] | None) -> tuple[float, float, Tensor]:
    """Validation and test loss of the untrained module, and what it predicts for this rank's rows."""
    torch.manual_seed(0)
    module = Evaluates()
    strategy = make_strategy(mesh, {}) if mesh else None
    trainer = make_trainer(strategy, 2 if mesh else 1, precision=precision)
    rank, shards = (torch.distributed.get_rank(), 2) if mesh else (0, 1)
    loader = module.loader(rank, shards)
    (validated,) = trainer.validate(module, loader, verbose=False)
    (tested,) = trainer.test(module, loader, verbose=False)
    predicted = trainer.predict(module, loader)
    return validated["val"], tested["test"], torch.cat(predicted)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_evaluation_is_that_of_one_device(precision: str, worlds: Worlds) -> None:
    validated, tested, predicted = evaluate(precision, None)
    answers = worlds(2).run(evaluate, precision, MESH)
    rows = [part.chunk(2) for part in predicted.split(Net.rows)]
    for rank, answer in enumerate(answers):
        assert answer[0] == pytest.approx(validated, rel=1e-6 if precision == "bf16-mixed" else 1e-2)
        assert answer[1] == pytest.approx(tested, rel=1e-6 if precision == "bf16-mixed" else 1e-2)
        assert answer[2].dtype == predicted.dtype == torch.bfloat16
        torch.testing.assert_close(answer[2], torch.cat([part[rank] for part in rows]), rtol=0, atol=0)


class Products(Net):
    """Nothing but products: every weight and bias is cast by autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))


class ProductsTwice(Products):
    """Gradients of one weight from two products: they are added up in float32."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x) + self.net(2 * x), y)


@dataclass(frozen=True, kw_only=True)
class Communicated:
    """One training: bytes per step by half and kind, bytes saved for the backward, launches, losses, parameters."""

    saved_bytes: int
    size_bytes: dict[tuple[str, str], int]
    launches: dict[str, int]
    losses: list[float]
    parameters: dict[str, Tensor]


def communicate(kind: type[Products], precision: str, disabled: list[str]) -> Communicated:
    torch.manual_seed(0)
    module, losses = kind(), Losses()
    strategy = make_strategy(MESH, {"plan": "fsdp", "disabled_passes": disabled})
    trainer = make_trainer(strategy, 2, precision=precision, callbacks=[losses])
    trainer.fit(module, module.loader(torch.distributed.get_rank(), 2))
    report = strategy.reports["training_step"]
    return Communicated(
        saved_bytes=report.saved_bytes,
        size_bytes={
            (half, kind): sum(count.size_bytes for count in by_axes.values())
            for half, table in report.collectives.items()
            for kind, by_axes in table.items()
        },
        launches=report.launches(),
        losses=losses.values,
        parameters={name: full(parameter) for name, parameter in module.named_parameters()},
    )


@pytest.mark.parametrize("kind", [Products, ProductsTwice])
def test_casts_are_gathered_narrow_and_gradients_reduced_wide(kind: type[Products], worlds: Worlds) -> None:
    plain = worlds(2).run(communicate, kind, "32-true", [])[0]
    mixed = worlds(2).run(communicate, kind, "bf16-mixed", [])[0]
    for half in ("forward", "backward"):
        assert 2 * mixed.size_bytes[half, "all_gather"] == plain.size_bytes[half, "all_gather"] > 0
    for kind in ("reduce_scatter", "all_reduce"):
        assert mixed.size_bytes.get(("backward", kind)) == plain.size_bytes.get(("backward", kind))
    assert mixed.launches == plain.launches
    assert mixed.losses != plain.losses


def test_casting_before_a_gather_changes_no_bit(worlds: Worlds) -> None:
    for moved, behind in zip(
        worlds(2).run(communicate, Products, "bf16-mixed", []),
        worlds(2).run(communicate, Products, "bf16-mixed", ["cast_before_gather"]),
        strict=True,
    ):
        assert 2 * moved.size_bytes["forward", "all_gather"] == behind.size_bytes["forward", "all_gather"]
        assert moved.saved_bytes == behind.saved_bytes  # the casts of shards are made again, not kept
        assert moved.losses == behind.losses
        torch.testing.assert_close(moved.parameters, behind.parameters, rtol=0, atol=0)


def passes_of(precision: str) -> dict[str, tuple[int, int]]:
    """All-gathered bytes before and after each pass over the joint graph."""
    strategy = make_strategy(MESH, {"plan": "fsdp"})
    trainer = make_trainer(strategy, 2, precision=precision)
    trainer.fit(Products(), Products().loader(torch.distributed.get_rank(), 2))
    return {
        report.name: tuple(
            sum(count.size_bytes for count in table["all_gather"].values()) for table in (report.before, report.after)
        )
        for report in strategy.reports["training_step"].passes
        if report.graph == "training_step"
    }


def test_the_report_says_what_the_pass_did(worlds: Worlds) -> None:
    before, after = worlds(2).run(passes_of, "bf16-mixed")[0]["cast_before_gather"]
    assert before == 2 * after > 0
    before, after = worlds(2).run(passes_of, "32-true")[0]["cast_before_gather"]
    assert before == after > 0
