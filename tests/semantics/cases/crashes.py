"""Steps and Trainers that once ended in an error that named neither cause nor line."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from lightning.pytorch.profilers import PyTorchProfiler
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.utils.data import DataLoader

from tests.semantics.base import FORWARD, STEP, Case, Copies, On


class OneHot(Case):
    pair = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        target = F.one_hot(y, 3).float() * 0.9 + 0.1 / 3
        return -(target * F.log_softmax(self.net(x), 1)).sum(1).mean()


class OneHotWithoutCount(Case):
    """The number of classes is read from the labels."""

    def collate(self, x, y, index):
        y[0] = y[self.rows // 2] = 2
        return x, y

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.net(x).softmax(1) - F.one_hot(y)).square().mean() * (1 + batch_idx)


class ConstantMask(Case):
    """Selected by a mask that is no part of the batch."""

    def __init__(self):
        super().__init__()
        self.mask = torch.tensor([True, False, True, True])

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss((F.pad(x[:, self.mask], (0, 1)), y))


class ConstantMaskChanges(ConstantMask):
    """Which a hook replaces, by one that selects as many."""

    def on_train_epoch_end(self):
        self.mask = torch.tensor([False, True, True, True])


class ListOfConstant(Case):
    def training_step(self, batch, batch_idx):
        order = torch.tensor([2, 0, 3, 1]).tolist()
        x, y = batch
        return self.loss((torch.stack([x[:, i] for i in order], 1), y)) * (1 + batch_idx)


class ConstantFromBuffer(Case):
    """A table of a submodule as a list."""

    def __init__(self):
        super().__init__()
        self.register_buffer("sizes", torch.tensor([1, 3]))

    def training_step(self, batch, batch_idx):
        x, y = batch
        first, second = x.split(self.sizes.tolist(), 1)
        return self.loss((torch.cat([second, first], 1), y)) * (1 + batch_idx)


class FrozenDict(dict):
    """A configuration that refuses changes, as diffusers' does."""

    def _refuse(self, *args, **kwargs):
        raise RuntimeError("frozen")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = _refuse


class FrozenConfig(Case):
    def __init__(self):
        super().__init__()
        self.config = FrozenDict(scale=2.0, sizes=[1, 2])

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.config["scale"] * (1 + batch_idx)


class InferenceMode(Case):
    """Features of a frozen net under inference_mode."""

    pair = True

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.inference_mode():
            features = self.frozen(x)
        return self.loss((features.clone() * (1 + batch_idx), y))


class Lazy(Case):
    """Modules that learn their sizes from the first batch."""

    refusal = "[Ll]azy|uninitiali[sz]ed"

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(3))

    def on_fit_start(self):
        torch.manual_seed(0)

    def setup(self, stage):
        torch.manual_seed(0)
        with torch.no_grad():
            self.net(torch.zeros(2, 4))


class LazyUntilFirstStep(Case):
    """Without the dry run that Lightning asks for: DDP refuses it as well, so may we."""

    alone = True
    refusal = "[Ll]azy|uninitiali[sz]ed"

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(3))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Distributions(Case):
    """torch.distributions checks its arguments by reading them."""

    quick = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        prior = Normal(torch.zeros(3), torch.ones(3))
        logits = self.net(x)
        divergence = kl_divergence(Normal(logits, F.softplus(logits) + 0.1), prior).sum(1).mean()
        return -Categorical(logits=logits).log_prob(y).mean() + 0.1 * divergence * (1 + batch_idx)


class DistributionsUnchecked(Case):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return -Categorical(logits=self.net(x), validate_args=False).log_prob(y).mean() * (1 + batch_idx)


class DetectsAnomaly(Case):
    trainer_options: ClassVar = {"detect_anomaly": True}

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + batch_idx)


class ProfiledByTorch(Case):
    def arguments(self):
        return {"profiler": PyTorchProfiler(export_to_chrome=False)}

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + batch_idx)


class ProfiledSimply(Case):
    trainer_options: ClassVar = {"profiler": "simple"}

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + batch_idx)


class EmptyLoader(Case):
    """No batch at all: nothing is trained, and nothing is wrong."""

    def loader(self, batches, rank, shards):
        return DataLoader(Copies([]), batch_size=None)


class EmptyValidation(Case):
    validates = True

    def loader(self, batches, rank, shards):
        return super().loader([] if len(batches) == 2 else batches, rank, shards)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


class Checkpointed(Case):
    """A region that is recomputed."""

    quick = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = torch.utils.checkpoint.checkpoint(self.net[:2], x, use_reentrant=False)
        return F.cross_entropy(self.net[2](hidden), y) * (1 + batch_idx)


class CheckpointedReentrant(Case):
    """The older kind, which wants an input with a gradient."""

    leaves_unused = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        x.requires_grad_()
        hidden = torch.utils.checkpoint.checkpoint(self.net[:2], x, use_reentrant=True)
        return F.cross_entropy(self.net[2](hidden), y) * (1 + batch_idx)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5


class OwnFunction(Case):
    """An autograd function of the user's."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = _Straight.apply(self.net[1](self.net[0](x)) * 3)
        return F.cross_entropy(self.net[2](hidden), y) * (1 + batch_idx)


class VmapOfGradients(Case):
    """torch.func within the step: gradients of each row."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        slopes = torch.func.vmap(torch.func.grad(lambda row: self.net(row).square().sum()))(x)
        return self.loss((x, y)) + 0.1 * slopes.detach().square().mean() * (1 + batch_idx)


class FunctionalCall(Case):
    """Weights changed for one call: a step of MAML."""

    refusal = "create_graph|functional|autograd"

    def training_step(self, batch, batch_idx):
        x, y = batch
        names, values = zip(*self.net.named_parameters(), strict=True)
        inner = F.cross_entropy(self.net(x), y)
        gradients = torch.autograd.grad(inner, values, create_graph=True)
        faster = {n: v - 0.1 * g for n, v, g in zip(names, values, gradients, strict=True)}
        return F.cross_entropy(torch.func.functional_call(self.net, faster, (x,)), y)


class BFloat(Case):
    """Mixed precision around a BatchNorm, whose statistics stay float32."""

    trainer_options: ClassVar = {"precision": "bf16-mixed"}
    tolerance = 2e-2
    keeps = ("dtypes",)

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.dtypes = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.net[1](self.net[0](x))
        self.dtypes = [str(hidden.dtype), str(self.net[1].running_mean.dtype)]
        return F.cross_entropy(self.net[2](hidden), y) * (1 + batch_idx)


class AutocastInStep(Case):
    """A region of another precision, chosen by an attribute."""

    tolerance = 2e-2

    def __init__(self):
        super().__init__()
        self.half = False

    def on_train_epoch_end(self):
        self.half = True

    def training_step(self, batch, batch_idx):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.half):
            logits = self.net(batch[0])
        self.log("half", float(logits.dtype == torch.bfloat16))
        return F.cross_entropy(logits.float(), batch[1])


class PrintsEachStep(Case):
    """`print` at each step, as many lines as on one device."""

    pair = prints = True

    def training_step(self, batch, batch_idx):
        print("training", batch_idx, self.current_epoch)
        return self.loss(batch)


class ClipsByTrainer(Case):
    """The Trainer clips; the step knows the value."""

    trainer_options: ClassVar = {"gradient_clip_val": 0.1}

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + batch_idx) * self.trainer.gradient_clip_val * 20


class Overfits(Case):
    """A Trainer that stops after some batches, and validates in between."""

    validates = True
    trainer_options: ClassVar = {"limit_train_batches": 2, "val_check_interval": 1}

    def callbacks(self):
        return [On(train_batch_end=lambda trainer, module, index: setattr(module, "level", index + 2.0))]

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * getattr(self, "level", 1.0)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch) * getattr(self, "level", 1.0))


class MultilabelMargin(Case):
    """Rows have fewer labels than classes: what torch takes apart under fake tensors counts the rest, too."""

    modes = STEP
    quick = pair = True

    def training_step(self, batch, batch_idx):
        x, y = batch
        labels = torch.stack([y, torch.full_like(y, -1), y], 1)
        each = nn.MultiLabelMarginLoss(reduction="none")(self.net(x), labels)
        return F.multilabel_margin_loss(self.net(x) * 2, labels) + each.mean() * 0.5


class CompiledPart(Case):
    """What `torch.compile` makes of a module is one without a flag of its own for training."""

    modes = FORWARD
    quick = True

    def __init__(self):
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


class OtherWeights(Case):
    """A module called with the weights that it had at first, which `functional_call` puts in their places."""

    modes = FORWARD
    quick = pair = True

    def on_train_start(self):
        self.first = {name: p.detach().clone() for name, p in self.net.named_parameters()}

    def on_train_end(self):
        del self.first

    def training_step(self, batch, batch_idx):
        x, _ = batch
        before = torch.func.functional_call(self.net, self.first, (x,))
        return self.loss(batch) + F.mse_loss(self.net(x), before)


class SparseEmbedding(Case):
    """Its gradients are dense in shards. (Under DDP over gloo those of several ranks end elsewhere.)"""

    modes = STEP
    quick = alone = True

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3, 3, sparse=True)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x) + self.table((y + 1) % 3), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
