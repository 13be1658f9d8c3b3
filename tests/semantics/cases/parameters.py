"""What hangs on parameters before they are shared out: attributes, hooks of their gradients."""

from __future__ import annotations

import torch

from tests.semantics.base import FORWARD, Case


class AttributeOfParameter(Case):
    """A mark that `configure_optimizers` makes groups by."""

    quick = pair = True

    def __init__(self):
        super().__init__()
        self.net[0].weight.is_fast = True

    def configure_optimizers(self):
        fast = [p for p in self.parameters() if getattr(p, "is_fast", False)]
        others = [p for p in self.parameters() if not getattr(p, "is_fast", False)]
        return torch.optim.SGD([{"params": fast, "lr": 0.5}, {"params": others}], lr=0.1)


class HookOfParameter(Case):
    quick = True

    def __init__(self):
        super().__init__()
        self.handle = self.net[0].weight.register_hook(lambda gradient: gradient * 0.5)

    def on_train_epoch_end(self):
        self.handle.remove()


class HookAfterGradient(Case):
    keeps = ("calls",)

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.net[0].weight.register_post_accumulate_grad_hook(self._count)

    def _count(self, parameter):
        self.calls += 1


class _SetsRequiresGrad(Case):
    """The step itself decides what trains."""

    modes = FORWARD

    def training_step(self, batch, batch_idx):
        for parameter in self.net[0].parameters():
            self.set(parameter, self.current_epoch == 1)
        return self.loss(batch)

    def set(self, parameter, value):
        raise NotImplementedError


class RequiresGradAssigned(_SetsRequiresGrad):
    quick = True

    def set(self, parameter, value):
        parameter.requires_grad = value


class RequiresGradByMethod(_SetsRequiresGrad):
    def set(self, parameter, value):
        parameter.requires_grad_(value)
