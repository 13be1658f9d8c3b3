"""What steps return, beside the loss."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tests.semantics.base import Case


class _Predicts(Case):
    predicts = True
    epochs, steps = 1, 2


class PredictsIdentifiers(_Predicts):
    """Only the batch's own names."""

    pair = True

    def collate(self, x, y, index):
        return {"x": x, "y": y, "id": [f"{index}-{row}" for row in range(self.rows)]}

    def loss(self, batch):
        return super().loss((batch["x"], batch["y"]))

    def predict_step(self, batch, batch_idx):
        return batch["id"]


class PredictsBoth(PredictsIdentifiers):
    """Names beside tensors, and the batch's index."""

    def predict_step(self, batch, batch_idx):
        return {"ids": batch["id"], "classes": self.net(batch["x"]).argmax(1), "index": batch_idx, "kind": "logits"}


class PredictsIndex(_Predicts):
    quick = True

    def predict_step(self, batch, batch_idx):
        return batch_idx


class PredictsText(_Predicts):
    def predict_step(self, batch, batch_idx):
        return f"batch {batch_idx} of {len(batch[0]) * 0 + 2}"


class PredictsAttribute(_Predicts):
    """What a hook has counted."""

    def on_predict_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.count = batch_idx + 5

    def predict_step(self, batch, batch_idx):
        return self.count, self.net(batch[0])


class PredictsList(_Predicts):
    """Plain numbers by `tolist`."""

    quick = True

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).argmax(1).tolist()


class PredictsArray(_Predicts):
    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).detach().cpu().numpy()


class PredictsAsLongAsTheBatch(_Predicts):
    """A vector that is as long as the global batch by chance."""

    pair = True

    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(3, 8)

    def loss(self, batch):
        return F.cross_entropy(self.wide(self.net(batch[0])), batch[1])

    def predict_step(self, batch, batch_idx):
        return {"weights": self.wide.weight.sum(1), "mean": self.wide(self.net(batch[0])).mean() * torch.ones(8)}


class PredictsTransposed(_Predicts):
    """The rows in another dim."""

    rows_elsewhere = True
    refusal = "predict_step"

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])[:, :2].T.contiguous()

    @classmethod
    def check(cls, outcome):
        for value in outcome.predicted:
            assert value.shape[0] == 2


class PredictsPerTwoRows(_Predicts):
    """Half as many rows as the batch has."""

    rows_elsewhere = True
    refusal = "predict_step"

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).view(-1, 2, 3).mean(1)


@dataclass
class Output:
    """What Hugging Face's models return."""

    loss: Any
    logits: Any


class ReturnsObject(Case):
    """A dataclass as the result of the validation."""

    validates = True

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch[0]).mean(0)
        return Output(loss=F.cross_entropy(self.net(batch[0]), batch[1]), logits=logits)


class ReturnsMapping(Case):
    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        return OrderedDict(loss=loss, logits=logits.detach(), index=batch_idx, text=f"step {self.global_step}")


class ReturnsRows(Case):
    """Logits and labels of the rank's rows, for metrics in a hook."""

    quick = True
    keeps = ("hits",)

    def __init__(self):
        super().__init__()
        self.hits = 0

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        return {"loss": F.cross_entropy(logits, batch[1]), "logits": logits, "rows": [logits[:, 0], (batch[1],)]}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert len(outputs["logits"]) == len(batch[1])
        self.hits = float((outputs["logits"].argmax(1) == batch[1]).sum() * 0) + self.global_step


class ValidatesWithNothing(Case):
    """Nothing is returned on odd batches."""

    validates = True

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return loss if batch_idx % 2 == 0 else None


class ReturnsGradient(Case):
    """The loss keeps its graph in the result; what hooks get is detached."""

    keeps = ("needs",)

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        return {"loss": F.cross_entropy(logits, batch[1]), "mean": logits.mean()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.needs = [outputs["loss"].requires_grad]


class LossNamedOnly(Case):
    """The first result is no loss: only its name counts."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return {"regular": loss * 100, "loss": loss + self.net[0].weight.square().mean(), "none": None}


class ValidationWithoutTensors(Case):
    """Plain numbers only, which differ by batch."""

    validates = True

    def validation_step(self, batch, batch_idx):
        return {"index": batch_idx, "epoch": self.current_epoch, "name": f"val{batch_idx}"}
