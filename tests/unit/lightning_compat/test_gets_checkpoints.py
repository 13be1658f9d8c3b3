"""Whether a hook is given what is loaded, or saved."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint, WeightAveraging

from lightning_autoparallel.lightning_compat import gets_checkpoints


class Plain(LightningModule):
    pass


class Hooked(LightningModule):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...


class Loads(LightningModule):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any: ...


class HookedCallback(Callback):
    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None: ...


def gets(module: LightningModule, *callbacks: Callback) -> bool:
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False}
    module.trainer = Trainer(accelerator="cpu", callbacks=list(callbacks), **options)
    return gets_checkpoints(module, "on_load_checkpoint")


def test_modules() -> None:
    assert not gets(Plain())
    assert gets(Hooked())
    assert gets(Loads())


def test_a_hook_of_one_instance() -> None:
    module = Plain()
    module.on_load_checkpoint = lambda checkpoint: None  # type: ignore[method-assign]
    assert gets(module)


@pytest.mark.parametrize(
    ("callback", "expected"),
    [
        (EarlyStopping("loss"), False),
        (ModelCheckpoint(), False),
        (LambdaCallback(on_fit_start=print), False),
        (LambdaCallback(on_load_checkpoint=print), True),
        (HookedCallback(), True),
        (WeightAveraging(), True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Callback) else str(value),
)
def test_callbacks(callback: Callback, expected: bool) -> None:
    assert gets(Plain(), callback) is expected


def test_a_module_without_a_trainer() -> None:
    assert gets_checkpoints(Plain(), "on_save_checkpoint"), "nothing is known of callbacks"


class HookedAtSaving(LightningModule):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("module", "callback", "expected"),
    [
        (Plain, ModelCheckpoint(), False),
        (Hooked, HookedCallback(), False),
        (HookedAtSaving, ModelCheckpoint(), True),
        (Plain, LambdaCallback(on_save_checkpoint=print), True),
        (Plain, WeightAveraging(), True),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else type(value).__name__,
)
def test_what_is_saved(module: type[LightningModule], callback: Callback, expected: bool) -> None:
    made = module()
    gets(made, callback)
    assert gets_checkpoints(made, "on_save_checkpoint") is expected
