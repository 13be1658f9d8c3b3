"""Steps that optimize by themselves, and other trainings that no single loss describes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.semantics.base import FORWARD, Case


class _Manual(Case):
    modes = FORWARD
    keeps = ("last",)
    names_line = False

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.last = None


class OneOptimizer(_Manual):
    quick = True

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.last = loss.detach()
        self.log("loss", loss)
        return loss


class AccumulatesByHand(_Manual):
    pair, steps = True, 4

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch) / 2
        self.manual_backward(loss)
        if (batch_idx + 1) % 2 == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        self.last = loss.detach()


class SchedulerByHand(_Manual):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()
        self.log("rate", optimizer.param_groups[0]["lr"])


class TwoBackwards(_Manual):
    """Two losses, each with a backward of its own, before one step."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        hidden = self.net[1](self.net[0](batch[0]))
        self.manual_backward(F.cross_entropy(self.net[2](hidden), batch[1]), retain_graph=True)
        self.manual_backward(0.1 * hidden.square().mean())
        optimizer.step()
        self.last = hidden.detach().mean()


class WithClosure(_Manual):
    """The optimizer calls the step's loss back."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        self.last = optimizer.step(closure=closure)


class _Gan(_Manual):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 4))
        self.critic = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        del self.net

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.2) for part in (self.generator, self.critic)]

    def noise(self, x):
        return x[:, :2].sin()


class Gan(_Gan):
    """Two optimizers that are toggled."""

    pair = True

    def training_step(self, batch, batch_idx):
        x, _ = batch
        for_generator, for_critic = self.optimizers()
        self.toggle_optimizer(for_generator)
        fake = self.critic(self.generator(self.noise(x)))
        loss = F.binary_cross_entropy_with_logits(fake, torch.ones_like(fake))
        self.log("generator", loss)
        self.manual_backward(loss)
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)
        self.toggle_optimizer(for_critic)
        real, fake = self.critic(x), self.critic(self.generator(self.noise(x)).detach())
        loss = F.softplus(-real).mean() + F.softplus(fake).mean()
        self.log("critic", loss)
        self.manual_backward(loss)
        for_critic.step()
        for_critic.zero_grad()
        self.untoggle_optimizer(for_critic)
        self.last = loss.detach()


class AlternatingGan(_Gan):
    """One optimizer per batch, in turn."""

    steps = 4

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()[batch_idx % 2]
        x, _ = batch
        fake = self.critic(self.generator(self.noise(x)))
        loss = F.softplus(-fake).mean() if batch_idx % 2 == 0 else (fake - self.critic(x)).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.last = loss.detach()


class GradientPenalty(_Gan):
    """WGAN-GP: a gradient of the critic within the loss."""

    refusal = "create_graph"

    def training_step(self, batch, batch_idx):
        x, _ = batch
        _, for_critic = self.optimizers()
        mixed = (0.3 * x + 0.7 * self.generator(self.noise(x)).detach()).requires_grad_()
        score = self.critic(mixed)
        (gradient,) = torch.autograd.grad(score.sum(), mixed, create_graph=True)
        loss = score.mean() + ((gradient.norm(dim=1) - 1) ** 2).mean()
        for_critic.zero_grad()
        self.manual_backward(loss)
        for_critic.step()
        self.last = loss.detach()


class ClippedCritic(_Gan):
    """WGAN: weights clamped in place after the step."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        _, optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = (self.critic(self.generator(self.noise(x)).detach()) - self.critic(x)).mean()
        self.manual_backward(loss)
        optimizer.step()
        for parameter in self.critic.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        self.last = loss.detach()


class GradientsByHand(_Manual):
    """Gradients scaled, and logged, between backward and step."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        for parameter in self.parameters():
            parameter.grad.mul_(0.5 if batch_idx == 1 else 1.0)
        optimizer.step()
        self.last = loss.detach()


class SkipsByNone(Case):
    """A batch that all ranks skip."""

    pair, steps, skips, names_line = True, 4, True, False

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            return None
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


class SkipsFirst(Case):
    """The very first batch, so that a look-ahead sees no loss."""

    skips, names_line = True, False

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return None if self.global_step == 0 and batch_idx == 0 else loss


class SkipsByHook(Case):
    """A hook that leaves the rest of the epoch out."""

    quick, steps = True, 4

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


class BackwardHook(Case):
    """Lightning's own hooks around the backward and the optimizer's step."""

    keeps = ("seen",)

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_before_backward(self, loss):
        self.seen.append(loss.detach().clone())

    def backward(self, loss, *args, **kwargs):
        (loss * (1 + self.global_step)).backward()

    def on_after_backward(self):
        for parameter in self.net[0].parameters():
            parameter.grad.mul_(0.5)


class OptimizerStepHook(Case):
    """Warm-up in `optimizer_step`, as Lightning's documentation has it."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 + batch_idx)
        optimizer.step(closure=optimizer_closure)

    def training_step(self, batch, batch_idx):
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        return self.loss(batch)


class Lbfgs(Case):
    """An optimizer that calls the step several times for one batch."""

    steps = 2
    keeps = ("calls",)
    tolerance = 1e-4

    def __init__(self):
        super().__init__()
        self.calls = 0

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    def training_step(self, batch, batch_idx):
        self.calls += 1
        return self.loss(batch)
