"""Steps that change the batch, parameters or tensors they keep, in place."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.semantics.base import Case


class _SeesBatch(Case):
    """A hook looks at the batch after the step."""

    keeps = ("seen",)

    def __init__(self):
        super().__init__()
        self.seen = None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        values = batch if isinstance(batch, dict) else dict(enumerate(batch))
        self.seen = {str(name): list(value.shape[1:]) for name, value in values.items()}


class IgnoresPadding(Case):
    """The most common one: `labels[labels == pad] = -100`."""

    pair = True

    def collate(self, x, y, index):
        return {"x": x, "labels": y}

    def training_step(self, batch, batch_idx):
        labels = batch["labels"]
        labels[labels == 0] = -100
        logits = self.net(batch["x"])
        kept = (labels != -100).float()
        return (F.cross_entropy(logits, labels, ignore_index=-100, reduction="none") * kept).mean()


class IgnoresPaddingSeen(IgnoresPadding):
    """A hook after the step sees the change."""

    keeps = ("padded",)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.padded = (batch["labels"] == -100).all().item() or bool((batch["labels"] == 0).any())


class ScalesBatch(Case):
    def training_step(self, batch, batch_idx):
        x, y = batch
        x.mul_(0.5).add_(1.0)
        x[:, 0] = 0.0
        x += 0.25 * (1 + batch_idx)
        return self.loss((x, y))


class PopsFromBatch(_SeesBatch):
    """`batch.pop("labels")`: the dict itself changes."""

    def collate(self, x, y, index):
        return {"x": x, "labels": y}

    def training_step(self, batch, batch_idx):
        labels = batch.pop("labels")
        return self.loss((batch["x"], labels))


class AddsToBatch(_SeesBatch):
    """Features for a callback."""

    quick = True

    def collate(self, x, y, index):
        return {"x": x, "y": y}

    def training_step(self, batch, batch_idx):
        batch["logits"] = self.net(batch["x"])
        return F.cross_entropy(batch["logits"], batch["y"])


class NeedsInputGradient(Case):
    """`requires_grad_` on a leaf of the batch, for a penalty."""

    quick = True
    refusal = "create_graph|requires_grad"

    def training_step(self, batch, batch_idx):
        x, y = batch
        x.requires_grad_()
        score = self.net(x)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return F.cross_entropy(score, y) + gradient.square().mean()


class AdversarialInput(Case):
    """A gradient with respect to the input, of first order only."""

    refusal = "requires_grad|autograd"

    def training_step(self, batch, batch_idx):
        x, y = batch
        probe = x.detach().clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.loss((probe, y)), probe)
        return self.loss((x + 0.1 * gradient.sign(), y))


class MomentumEncoder(Case):
    """A teacher that follows the net: parameters changed under no_grad."""

    pair = True

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mine.mul_(0.5).add_(other, alpha=0.5)
            target = self.teacher(x).softmax(1)
        logits = self.net(x)
        return F.cross_entropy(logits, y) + 0.5 * F.cross_entropy(logits, target)


class MomentumByData(MomentumEncoder):
    """The same by `.data`, as BYOL's code has it."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        for mine, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mine.data = mine.data * 0.5 + other.data * 0.5
        with torch.no_grad():
            target = self.teacher(x).softmax(1)
        return self.loss(batch) + 0.5 * F.cross_entropy(self.net(x), target)


class MomentumByHook(MomentumEncoder):
    """The same after the step, in a hook, where parameters are DTensors."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            target = self.teacher(batch[0]).softmax(1)
        return self.loss(batch) + 0.5 * F.cross_entropy(self.net(batch[0]), target)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mine.copy_(mine * 0.5 + other * 0.5)


class AveragedByTorch(Case):
    """`AveragedModel.update_parameters` within the step."""

    def __init__(self):
        super().__init__()
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.average.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.average.update_parameters(self.net)
        with torch.no_grad():
            target = self.average(batch[0]).softmax(1)
        return self.loss(batch) + 0.5 * F.cross_entropy(self.net(batch[0]), target)


class TargetNetwork(Case):
    """DQN: the target net takes over the weights every second step, by state dict."""

    quick, steps = True, 4

    def __init__(self):
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        if self.global_step % 2 == 1:
            self.target.load_state_dict(self.net.state_dict())
        with torch.no_grad():
            goal = self.target(batch[0])
        return self.loss(batch) + (self.net(batch[0]) - 0.5 * goal).square().mean()


class ClampsWeights(Case):
    """Weights clamped in place before the forward."""

    pair = True

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.clamp_(-0.3, 0.3)
        return self.loss(batch)


class ClampsData(Case):
    def training_step(self, batch, batch_idx):
        self.net[0].weight.data.clamp_(-0.2, 0.2)
        return self.loss(batch)


class NormalisesPrototypes(Case):
    """SwAV: a head's rows are of length one before each step."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            weight = self.net[2].weight.clone()
            self.net[2].weight.copy_(F.normalize(weight, dim=1))
        return self.loss(batch)


class ZeroesRow(Case):
    """A padding row of an embedding is put back to zero."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.embed.weight[0] = 0.0
        x, y = batch
        return self.loss((x + self.embed((x[:, 0].abs() * 3).long().clamp(max=4)), y))


class TemperatureClamped(Case):
    """CLIP's learned temperature is clamped in the step."""

    quick = True

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.temperature.clamp_(0.95, 1.05)
        return F.cross_entropy(self.net(batch[0]) * self.temperature.exp(), batch[1])


class TeacherWithBuffers(Case):
    """A net with BatchNorm whose statistics are copied to a teacher's."""

    tolerance = 1e-4

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for mine, other in zip(self.teacher.buffers(), self.net.buffers(), strict=True):
                mine.copy_(other)
            target = self.teacher(batch[0]).softmax(1)
        return self.loss(batch) + 0.1 * F.cross_entropy(self.net(batch[0]), target)


class BatchNorm(Case):
    """Running statistics, and a momentum that a hook changes."""

    quick = validates = True
    tolerance = 1e-4

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    def on_train_epoch_start(self):
        self.net[1].momentum = 0.1 if self.current_epoch == 0 else 0.7

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


class SpectralNorm(Case):
    """A parametrization with a buffer of its own that each forward changes."""

    def __init__(self):
        super().__init__()
        self.net[0] = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6))


class WeightNorm(Case):
    def __init__(self):
        super().__init__()
        self.net[0] = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
