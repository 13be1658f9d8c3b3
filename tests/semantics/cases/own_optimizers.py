"""Optimizers as people write them: they read norms, dot products and factors of whole parameters, and put them back."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.optim import SGD, Optimizer

from tests.semantics.base import FORWARD, Case


class SharpnessAware(SGD):
    """Climbs to where the loss is worst nearby, and steps back before it descends by the gradient of there."""

    @torch.no_grad()
    def climb(self) -> None:
        norms = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = 0.05 / (torch.norm(torch.stack(norms), p=2) + 1e-12)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * scale)
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        super().step()
        self.zero_grad()


class SharpnessAwareByHand(Case):
    modes = FORWARD
    names_line = False

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return SharpnessAware(self.parameters(), lr=0.2)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers().optimizer
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.climb()
        self.manual_backward(self.loss(batch))
        optimizer.descend()
        return loss


class SharpnessAwareWithClosure(SharpnessAware):
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.climb()
        closure()
        self.descend()
        return loss


class SharpnessAwareInAStep(Case):
    quick = pair = True
    names_line = False

    def configure_optimizers(self):
        return SharpnessAwareWithClosure(self.parameters(), lr=0.2)


class _Own(Optimizer):
    """An update for each parameter, of its gradient and its state."""

    def __init__(self, parameters, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group["lr"])
        self.after()
        return loss

    def update(self, p, grad, state, lr) -> None:
        raise NotImplementedError

    def after(self) -> None:
        """Whatever a step does with all parameters together."""


class LayerwiseRates(_Own):
    def update(self, p, grad, state, lr):
        trust = 0.1 * p.norm() / (grad.norm() + 1e-8)
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
        buffer.mul_(0.9).add_(grad * trust)
        p.add_(buffer, alpha=-lr)


class LayerwiseMoments(_Own):
    def update(self, p, grad, state, lr):
        if not state:
            state["step"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        state["m"].mul_(0.9).add_(grad, alpha=0.1)
        state["v"].mul_(0.99).addcmul_(grad, grad, value=0.01)
        update = state["m"] / (1 - 0.9 ** state["step"]) / ((state["v"] / (1 - 0.99 ** state["step"])).sqrt() + 1e-5)
        weight_norm, update_norm = p.norm().item(), update.norm().item()
        ratio = weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else 1.0
        p.add_(update, alpha=-lr * ratio * 0.1)


class Lookahead(_Own):
    def __init__(self, parameters, lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        self.counter = 0

    def update(self, p, grad, state, lr):
        if "slow" not in state:
            state["slow"] = torch.empty_like(p.data)
            state["slow"].copy_(p.data)
        p.data.add_(grad, alpha=-lr)

    def after(self):
        self.counter += 1
        if self.counter % 2 == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p]["slow"]
                    slow.add_(p.data - slow, alpha=0.5)
                    p.data.copy_(slow)


class SignOfMoments(_Own):
    def update(self, p, grad, state, lr):
        average = state.setdefault("exp_avg", torch.zeros_like(p))
        p.mul_(1 - lr * 0.01)
        p.add_(average.clone().mul_(0.9).add(grad, alpha=0.1).sign_(), alpha=-lr * 0.1)
        average.mul_(0.99).add_(grad, alpha=0.01)


class CentredGradients(_Own):
    def update(self, p, grad, state, lr):
        if grad.dim() > 1:
            grad.add_(-grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True))
        p.add_(grad, alpha=-lr)


class EstimatedRate(_Own):
    """The rate grows with how well gradients point to where training began, over all parameters."""

    def __init__(self, parameters, lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        self.distance, self.dots, self.squares = 0.1, 0.0, 1e-8

    def update(self, p, grad, state, lr):
        if not state:
            state["began"] = p.detach().clone()
        self.dots += torch.dot(grad.flatten(), (state["began"] - p).flatten()).item()
        self.squares += (grad * grad).sum().item()

    def after(self):
        self.distance = max(self.distance, self.dots / self.squares**0.5)
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (self.distance * group["lr"]))


class WholeMatrices(_Own):
    """Preconditions by roots of what gradients' rows and columns have in common."""

    def update(self, p, grad, state, lr):
        if grad.dim() != 2:
            p.add_(grad, alpha=-lr)
            return
        if not state:
            state["left"], state["right"] = torch.eye(grad.shape[0]) * 1e-1, torch.eye(grad.shape[1]) * 1e-1
        state["left"] += grad @ grad.T
        state["right"] += grad.T @ grad
        p.sub_(self.root(state["left"]) @ grad @ self.root(state["right"]), alpha=lr)

    @staticmethod
    def root(matrix):
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T


class LargestOnly(_Own):
    """Updates the largest half of a gradient, and keeps the others for later."""

    def update(self, p, grad, state, lr):
        kept = state.setdefault("kept", torch.zeros_like(p))
        kept.add_(grad)
        least = kept.abs().flatten().kthvalue(max(kept.numel() // 2, 1)).values
        mask = kept.abs() >= least
        p.add_(torch.where(mask, kept, torch.zeros_like(kept)), alpha=-lr)
        kept.mul_(~mask)


class NoisyDescent(_Own):
    """Langevin dynamics with a generator of its own, the same on all ranks."""

    def __init__(self, parameters, lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        self.generator = torch.Generator().manual_seed(5)

    def update(self, p, grad, state, lr):
        noise = torch.randn(p.shape, generator=self.generator)
        p.add_(grad, alpha=-lr).add_(noise, alpha=0.01)


class BetweenTwoPoints(_Own):
    """Trains at a point between an average, which is validated, and where plain descent has got to."""

    def __init__(self, parameters, lr: float = 0.1) -> None:
        super().__init__(parameters, lr)
        self.trains, self.count = True, 0

    def update(self, p, grad, state, lr):
        assert self.trains
        z = state.setdefault("z", p.detach().clone())
        weight = 1 / (self.count + 1)
        p.lerp_(end=z, weight=weight)
        p.add_(grad, alpha=lr * (0.9 * (1 - weight) - 1))
        z.sub_(grad, alpha=lr)

    def after(self):
        self.count += 1

    @torch.no_grad()
    def go(self, trains: bool) -> None:
        if trains != self.trains:
            for group in self.param_groups:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=1 - 0.9 if trains else 1 - 1 / 0.9)
            self.trains = trains


class _Trained(Case):
    names_line = False
    kind: ClassVar[type[Optimizer]]

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=0.1)


class WithLayerwiseRates(_Trained):
    kind = LayerwiseRates


class WithLayerwiseMoments(_Trained):
    kind = LayerwiseMoments


class WithLookahead(_Trained):
    kind = Lookahead


class WithSignOfMoments(_Trained):
    kind = SignOfMoments


class WithCentredGradients(_Trained):
    kind = CentredGradients


class WithEstimatedRate(_Trained):
    kind = EstimatedRate


class WithWholeMatrices(_Trained):
    quick = True
    kind = WholeMatrices


class WithLargestOnly(_Trained):
    kind = LargestOnly


class WithNoisyDescent(_Trained):
    kind = NoisyDescent


class WithAdafactor(_Trained):
    kind = torch.optim.Adafactor


class WithMuon(_Trained):
    def configure_optimizers(self):
        return torch.optim.Muon([p for p in self.parameters() if p.dim() == 2], lr=0.1)


class WithAPointBetween(_Trained):
    validates = True

    def configure_optimizers(self):
        self.between = BetweenTwoPoints(self.parameters())
        return self.between

    def on_train_epoch_start(self):
        self.between.go(trains=True)

    def on_validation_epoch_start(self):
        self.between.go(trains=False)

    def on_validation_epoch_end(self):
        self.between.go(trains=True)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))
