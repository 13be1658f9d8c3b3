"""The LightningModule under a plain single-device Trainer: the oracle that parallel runs are compared with."""

import math

import lightning
import pytest
import torch

from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.models import Llama3Module, TextDataModule
from lightning_autoparallel.models.context_report import EntropyReport
from lightning_autoparallel.models.module import warmup_cosine

SMALL = {"dim": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1}


class _LossHistory(lightning.Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())


def _trainer(tmp_path, steps, callbacks):
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        val_check_interval=steps,
        check_val_every_n_epoch=None,
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=callbacks,
    )


def _data():
    return TextDataModule(seq_len=32, batch_size=8, max_bytes=100_000)


def test_training_lowers_the_loss_and_logs(tmp_path, capsys):
    lightning.seed_everything(0, verbose=False)
    history = _LossHistory()
    module = Llama3Module("debug", SMALL, lr=1e-2, warmup_steps=5, max_steps=30)
    trainer = _trainer(tmp_path, 30, [history, EntropyReport()])
    trainer.fit(module, _data())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert history.losses[0] == pytest.approx(math.log(256), rel=0.02)
    assert history.losses[-1] < history.losses[0] - 1.5
    assert metrics["train_loss"] == pytest.approx(history.losses[-1])
    assert metrics["val_perplexity"] == pytest.approx(math.exp(metrics["val_loss"]), rel=1e-4)
    assert metrics["tokens_per_second"] > 0
    assert f"validation loss {metrics['val_loss']:.3f} nats/byte" in capsys.readouterr().out


def test_test_and_predict_share_the_module(tmp_path):
    module, data = Llama3Module("debug", SMALL), _data()
    trainer = _trainer(tmp_path, 1, [])
    assert trainer.test(module, data, verbose=False)[0]["test_loss"] == pytest.approx(math.log(256), rel=0.02)
    tokens = trainer.predict(module, data)[0]
    assert (tokens.shape, tokens.dtype) == ((8, 32), torch.int64)


def test_configure_model_builds_once():
    module = Llama3Module("debug", SMALL)
    assert module.model is None
    module.configure_model()
    built = module.model
    module.configure_model()
    assert module.model is built


def test_step_reads_no_values_from_tensors():
    module = Llama3Module("debug", SMALL)
    # meta tensors have no values: reading one raises
    with torch.device("meta"):
        module.configure_model()
        tokens = torch.zeros(4, 16, dtype=torch.int64)
    module._loss({"inputs": tokens, "targets": tokens}).backward()
    assert all(p.grad is not None and p.grad.is_meta for p in module.parameters())


def test_only_matrices_decay():
    module = Llama3Module("debug", SMALL, weight_decay=0.3)
    module.configure_model()
    groups = module.configure_optimizers()["optimizer"].param_groups
    decayed, kept = ({p.ndim for p in group["params"]} for group in groups)
    assert (decayed, kept) == ({2}, {1})
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]


def test_learning_rate_rises_then_follows_half_a_cosine():
    shares = [warmup_cosine(step, warmup_steps=4, max_steps=12, min_lr_ratio=0.2) for step in (0, 3, 4, 8, 12, 99)]
    assert shares == pytest.approx([0.25, 1.0, 1.0, 0.6, 0.2, 0.2])


def test_entropy_report_refuses_other_data(tmp_path):
    module = Llama3Module("debug", SMALL)
    loader = _data().train_dataloader()
    with pytest.raises(ConfigError, match="EntropyReport"):
        _trainer(tmp_path, 1, [EntropyReport()]).fit(module, loader, loader)


def test_unknown_override_is_refused_at_once():
    with pytest.raises(ConfigError, match="has no width"):
        Llama3Module("debug", {"width": 1})
