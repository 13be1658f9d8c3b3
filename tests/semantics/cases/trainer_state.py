"""Steps that ask the Trainer, or tell it something."""

from __future__ import annotations

from typing import ClassVar

import torch

from tests.semantics.base import Case, On


class _Validated(Case):
    validates = True
    steps = 2

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return loss


class SanityChecking(_Validated):
    """What the sanity check leaves out must be there afterwards."""

    pair = True
    trainer_options: ClassVar = {"num_sanity_val_steps": 1}

    def validation_step(self, batch, batch_idx):
        if self.trainer.sanity_checking:
            return None
        return super().validation_step(batch, batch_idx)


class SanityCheckingWrites(_Validated):
    """The common form: outputs are gathered by the step, but not those of the sanity check."""

    trainer_options: ClassVar = {"num_sanity_val_steps": 1}
    keeps = ("seen",)

    def __init__(self):
        super().__init__()
        self.outputs, self.seen = [], []

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if not self.trainer.sanity_checking:
            self.outputs.append(loss)

    def on_validation_epoch_end(self):
        if self.outputs:
            self.seen.append(torch.stack(self.outputs).mean())
            self.outputs.clear()


class SharedStepByStage(_Validated):
    """One step for all stages that names its log by the Trainer's."""

    quick = True

    def training_step(self, batch, batch_idx):
        return self.shared(batch)

    def validation_step(self, batch, batch_idx):
        return self.shared(batch)

    def shared(self, batch):
        loss = self.loss(batch)
        self.log(f"{self.trainer.state.stage.dataloader_prefix}_loss", loss)
        return loss * 2 if self.trainer.validating or self.trainer.sanity_checking else loss


class StateFunction(_Validated):
    """One validation step for `fit` and `predict`, which differ."""

    predicts = True

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch) * (1.0 if self.trainer.state.fn == "fit" else 5.0)
        self.log(f"val_{self.trainer.state.fn.value}", loss)
        return loss

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]) * (1.0 if self.trainer.state.fn == "fit" else 5.0)


class ValidatedTwice(_Validated):
    """Validation within `fit`, where flags of training differ from those after it."""

    trainer_options: ClassVar = {"val_check_interval": 1}

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch) * (1 + self.trainer.global_step)
        self.log("val_loss", loss)
        return loss


class IsLastBatch(Case):
    quick = True

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * 3 if self.trainer.is_last_batch else loss


class CallbackMetrics(_Validated):
    """The last validation's loss, of all ranks, weighs the next epoch's."""

    pair, epochs = True, 3

    def training_step(self, batch, batch_idx):
        last = self.trainer.callback_metrics.get("val_loss")
        return self.loss(batch) if last is None else self.loss(batch) * last

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)


class CallbackMetricsOfNumber(Case):
    """A number that a callback logs, read back through the Trainer's metrics."""

    def on_train_batch_start(self, batch, batch_idx):
        self.log("level", float(batch_idx + 1))

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * float(self.trainer.callback_metrics.get("level", 1.0))


class LoggedMetrics(Case):
    """What was logged the step before."""

    def training_step(self, batch, batch_idx):
        before = self.trainer.logged_metrics.get("loss", 1.0)
        loss = self.loss(batch) * before
        self.log("loss", loss)
        return loss


class NumTrainingBatches(Case):
    """Progress through the training as a number."""

    quick = True

    def training_step(self, batch, batch_idx):
        done = self.current_epoch * self.trainer.num_training_batches + batch_idx
        progress = done / (self.trainer.max_epochs * self.trainer.num_training_batches)
        self.log("progress", progress)
        return self.loss(batch) * (1 - progress)


class EstimatedSteps(Case):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + self.global_step / self.trainer.estimated_stepping_batches)


class LogDirectory(Case):
    """`log_dir` asks all ranks for rank 0's."""

    pair = True

    def training_step(self, batch, batch_idx):
        assert self.trainer.log_dir is not None
        return self.loss(batch) * len(self.trainer.log_dir.split("/"))


class StopsInStep(Case):
    """A step that ends the training."""

    quick, steps = True, 5

    def training_step(self, batch, batch_idx):
        if self.global_step == 3:
            self.trainer.should_stop = True
        return self.loss(batch)


class TrainersAttributeByCallback(Case):
    def callbacks(self):
        return [On(train_batch_start=lambda trainer, module, index: setattr(trainer, "knob", index + 1.0))]

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * getattr(self.trainer, "knob", 1.0)


class DatasetAttribute(Case):
    """A curriculum that lives on the dataset."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        dataset = self.trainer.train_dataloader.dataset
        dataset.difficulty = getattr(dataset, "difficulty", 0) + 1

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + getattr(self.trainer.train_dataloader.dataset, "difficulty", 0))


class Accumulation(Case):
    """Another accumulation in the second epoch, which the step divides by."""

    trainer_options: ClassVar = {"accumulate_grad_batches": 2}
    steps = 4

    def on_train_epoch_end(self):
        self.trainer.accumulate_grad_batches = 1

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / self.trainer.accumulate_grad_batches


class LoggerDirectly(Case):
    """Rows that the step gives to the logger itself."""

    pair = True

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.logger.log_metrics({"direct": loss}, step=self.global_step)
        self.logger.experiment.add_scalar("scalar", loss.detach() * 2, self.global_step)
        return loss


class LoggersOfTrainer(Case):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        for logger in self.trainer.loggers:
            logger.log_metrics({"direct": batch_idx * 2.0}, step=batch_idx)
        return loss


class ProfiledRegion(Case):
    def training_step(self, batch, batch_idx):
        with self.trainer.profiler.profile("loss"):
            loss = self.loss(batch)
        return loss * (1 + batch_idx)


class ProgressOfLoop(Case):
    """The loop's own counters, by their long way."""

    def training_step(self, batch, batch_idx):
        ready = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        return self.loss(batch) / ready


class HasOwnFlag(Case):
    """A flag of the Trainer that changes: whether validation ran before this step."""

    validates = True

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * 0.5 if "val_loss" in self.trainer.callback_metrics else loss
