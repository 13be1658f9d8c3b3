"""Steps that read, or change, optimizers and schedulers."""

from __future__ import annotations

import torch

from tests.semantics.base import STEP, Case


class _Scheduled(Case):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class RateOfOptimizer(_Scheduled):
    pair, captures, steps = True, 2, 4
    modes = STEP

    def training_step(self, batch, batch_idx):
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        return self.loss(batch)


class RateOfScheduler(_Scheduled):
    quick = True

    def training_step(self, batch, batch_idx):
        self.log("rate", self.lr_schedulers().get_last_lr()[0])
        return self.loss(batch)


class RateByTrainer(_Scheduled):
    """The rate, through the Trainer, as a factor."""

    def training_step(self, batch, batch_idx):
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.log("rate", rate, prog_bar=True)
        return self.loss(batch) * (1 + rate)


class CountOfScheduler(_Scheduled):
    def training_step(self, batch, batch_idx):
        count = self.trainer.lr_scheduler_configs[0].scheduler.last_epoch
        return self.loss(batch) / (1 + count)


class MomentumByHook(_Scheduled):
    def on_train_epoch_end(self):
        self.optimizers().param_groups[0]["momentum"] = 0.9

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.optimizers().param_groups[0]["momentum"]


class StateOfOptimizer(_Scheduled):
    """Whether the optimizer has any state yet, and how much."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss if len(self.optimizers().state) else loss * 0.1


class RateSetInStep(Case):
    """Warm-up by hand: the step sets the rate that its own update uses."""

    quick = True

    def training_step(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"] = 0.05 * (self.global_step + 1)
        return self.loss(batch)


class RateOnPlateau(Case):
    validates = True
    epochs = 3

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def training_step(self, batch, batch_idx):
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        return self.loss(batch)


class MadeBeforeFit(Case):
    """An optimizer of the parameters as they were before sharding."""

    pair = True

    def __init__(self):
        super().__init__()
        self.made = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)

    def configure_optimizers(self):
        return self.made


class MadeBeforeFitInGroups(Case):
    def __init__(self):
        super().__init__()
        first, last = self.net[0].parameters(), self.net[2].parameters()
        self.made = torch.optim.AdamW([{"params": first, "lr": 0.1}, {"params": last, "lr": 0.01}])

    def configure_optimizers(self):
        return [self.made]


class ParameterNorm(Case):
    """The norm of the weights, logged, and as a number."""

    def training_step(self, batch, batch_idx):
        self.log("norm", sum(p.detach().square().sum() for p in self.parameters()).sqrt())
        self.log("count", float(sum(p.numel() for p in self.parameters())))
        return self.loss(batch) + 0.01 * sum(p.abs().sum() for p in self.net.parameters())


class GradientsOfLastStep(Case):
    """Gradients are None at the first step, which `zero_grad` makes them at each."""

    keeps = ("seen",)

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(sum(p.grad is not None for p in self.parameters()))
        return self.loss(batch)


class GradientsWhileAccumulating(Case):
    """Between two optimizer steps the gradients of the first batch are there to be read; under DDP, each rank's own."""

    alone = True
    trainer_options = {"accumulate_grad_batches": 2}  # noqa: RUF012
    steps = 4

    def training_step(self, batch, batch_idx):
        gradient = self.net[0].weight.grad
        norm = 0.0 if gradient is None else gradient.detach().square().sum()
        self.log("norm", norm)
        return self.loss(batch) * (1 + norm)
