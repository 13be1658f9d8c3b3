"""The LightningModules that are trained with and without us, by name, and their global batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.demos.transformer import Transformer as DemoTransformer
from torch import Tensor, nn

from lightning_autoparallel.models import Llama3Module

LAYERS = 2  # of models that repeat one


class Trained(LightningModule):
    """Adds an optimizer by name and a logged loss to a network whose `loss` is given by subclasses."""

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


class ConvNet(Trained):
    """Convolutions with BatchNorm: statistics of the global batch, buffers that the step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(8, 5)

    def loss(self, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.head(self.features(images).flatten(1)), labels)


class Tied(Trained):
    """An embedding that is the output layer too, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 12)
        self.hidden = nn.Linear(12, 12)
        self.output = nn.Linear(12, 30, bias=False)
        self.output.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(12), requires_grad=False)
        self.unused = nn.Linear(3, 3)

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        hidden = torch.tanh(self.hidden(self.embedding(tokens) * self.frozen))
        return F.cross_entropy(self.output(hidden).flatten(0, 1), targets.flatten())


class IgnoreIndex(Tied):
    """A mean over targets of which ranks hold unequal counts."""

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        hidden = torch.tanh(self.hidden(self.embedding(tokens)))
        return F.cross_entropy(self.output(hidden).flatten(0, 1), targets.flatten(), ignore_index=-1)


class Odd(Trained):
    """Dims that divide by nothing, scalars, a norm over the weights in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.SiLU(), nn.Linear(13, 5), nn.Dropout(0.0))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("steps", torch.zeros(()))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch["x"], batch["y"]
        if self.training:
            self.steps += 1
        error = (self.net(x) * self.scale - y).pow(2).mean()
        return error + 1e-3 * sum(parameter.pow(2).sum() for parameter in self.net.parameters())


class HuggingFaceLlama(Trained):
    """A small LlamaForCausalLM, as it comes."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
        self.model = LlamaForCausalLM(config)

    def loss(self, batch: Any) -> Tensor:
        return self.model(input_ids=batch["tokens"], labels=batch["tokens"]).loss


class HuggingFaceGPT2(HuggingFaceLlama):
    """A small GPT2LMHeadModel without dropout."""

    def __init__(self, layers: int = LAYERS) -> None:
        LightningModule.__init__(self)
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=50,
            n_positions=32,
            n_embd=16,
            n_layer=layers,
            n_head=4,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = GPT2LMHeadModel(config)


class Checkpointed(Trained):
    """The user's own activation checkpointing, of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.second = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)

    def loss(self, batch: Any) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x, y = batch["x"], batch["y"]
        hidden = checkpoint(self.first, x, use_reentrant=False)
        hidden = checkpoint(self.second, hidden, use_reentrant=True)
        return F.cross_entropy(self.head(hidden), y)


class Transformer(LightningTransformer):
    """Lightning's demo transformer without dropout.

    In float32 its training amplifies rounding: changing the weights by 6e-8 relative, on one device without us,
    changes the loss after 20 AdamW steps by 1e-2 (`python -m tests.numerics.sensitivity` prints it). So it is
    compared in float64.
    """

    def __init__(self, layers: int = LAYERS) -> None:
        LightningModule.__init__(self)
        self.model = DemoTransformer(vocab_size=40, nlayers=layers)
        for submodule in self.modules():
            if isinstance(submodule, nn.Dropout):
                submodule.p = 0.0
            if isinstance(submodule, nn.MultiheadAttention):
                submodule.dropout = 0.0
        self.double()
        # Made once, here: in float32 Inductor's sine and torch's differ in the last bit.
        positions = self.model.pos_encoder
        positions.pe = positions._init_pos_encoding(torch.device("cpu")).double()

    def prepare_data(self):
        """The batches are made here: nothing is downloaded."""


class Transformer32(Transformer):
    """The same in float32, for the few steps before its rounding has grown."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__(layers)
        self.float()
        self.model.pos_encoder.pe = None


class MaskedAttention(Trained):
    """Grouped-query attention with a mask per row of the batch, as padding masks are."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key_value = nn.Linear(16, 16), nn.Linear(16, 16)
        self.output = nn.Linear(16, 4)

    def loss(self, batch: Any) -> Tensor:
        x, lengths, y = batch["x"], batch["lengths"], batch["y"]
        rows, length, _ = x.shape
        query = self.query(x).view(rows, length, 4, 4).transpose(1, 2)
        key, value = self.key_value(x).view(rows, length, 2, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.arange(length, device=x.device)[None, None, None, :] < lengths[:, None, None, None]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        pooled = self.output(mixed.transpose(1, 2).flatten(2)).mean(1)
        return F.mse_loss(pooled, y)


class RoutedExperts(Trained):
    """Two of four experts for every token, all of them computed, and a loss that balances them over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.router = nn.Embedding(40, 16), nn.Linear(16, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 32) / 4), nn.Parameter(torch.randn(4, 32, 16) / 6)
        self.head = nn.Linear(16, 40)

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        x = self.embedding(tokens).flatten(0, 1)
        scores = self.router(x).softmax(-1)
        best, chosen = scores.topk(2, dim=-1)
        gates = torch.zeros_like(scores).scatter(1, chosen, best / best.sum(-1, keepdim=True))
        inner = F.silu(torch.einsum("td,edf->tef", x, self.up))
        mixed = torch.einsum("te,tef,efd->td", gates, inner, self.down)
        balance = (scores.mean(0) * (gates > 0).float().mean(0)).sum()
        return F.cross_entropy(self.head(x + mixed), targets.flatten()) + 0.1 * balance


def _llama(layers: int = LAYERS) -> LightningModule:
    return Llama3Module(size="debug", overrides={"dim": 32, "n_layers": layers})


def _tokens(generator: torch.Generator, rows: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (rows, length), generator=generator)


def _llama_batch(generator: torch.Generator, rows: int) -> Any:
    tokens = _tokens(generator, rows, 17, 256)
    return {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def _ignored_batch(generator: torch.Generator, rows: int) -> Any:
    tokens, targets = _tokens(generator, rows, 6, 30), _tokens(generator, rows, 6, 30)
    targets[0, 1:] = -1  # the first rank counts fewer targets than the others
    targets[1, 3:] = -1
    return tokens, targets


MODELS: dict[str, tuple[Callable[..., LightningModule], Callable[[torch.Generator, int], Any]]] = {
    "llama3": (_llama, _llama_batch),
    "transformer": (Transformer, lambda g, n: (_tokens(g, n, 6, 40), _tokens(g, n, 6, 40))),
    "transformer32": (Transformer32, lambda g, n: (_tokens(g, n, 6, 40), _tokens(g, n, 6, 40))),
    "attention": (
        MaskedAttention,
        lambda g, n: {
            "x": torch.randn(n, 5, 16, generator=g),
            "lengths": torch.randint(1, 6, (n,), generator=g),
            "y": torch.randn(n, 4, generator=g),
        },
    ),
    "experts": (RoutedExperts, lambda g, n: (_tokens(g, n, 6, 40), _tokens(g, n, 6, 40))),
    "boring": (BoringModel, lambda g, n: torch.randn(n, 32, generator=g)),
    "convnet": (
        ConvNet,
        lambda g, n: (torch.randn(n, 3, 8, 8, generator=g), torch.randint(0, 5, (n,), generator=g)),
    ),
    "tied": (Tied, lambda g, n: (_tokens(g, n, 6, 30), _tokens(g, n, 6, 30))),
    "ignore_index": (IgnoreIndex, _ignored_batch),
    "odd": (Odd, lambda g, n: {"x": torch.randn(n, 7, generator=g), "y": torch.randn(n, 5, generator=g)}),
    "hf_llama": (HuggingFaceLlama, lambda g, n: {"tokens": _tokens(g, n, 10, 50)}),
    "hf_gpt2": (HuggingFaceGPT2, lambda g, n: {"tokens": _tokens(g, n, 10, 50)}),
    "checkpointed": (
        Checkpointed,
        lambda g, n: {"x": torch.randn(n, 8, generator=g), "y": torch.randint(0, 3, (n,), generator=g)},
    ),
}


LAYERED = ("llama3", "transformer", "transformer32", "hf_llama", "hf_gpt2")  # which may have other numbers of layers


def make_model(name: str, seed: int = 0, **layers: int) -> LightningModule:
    """The named module with the weights that `seed` gives; its network is built, of so many `layers` if it has any."""
    torch.manual_seed(seed)
    module = MODELS[name][0](**layers)
    module.configure_model()
    return module


def make_batches(name: str, count: int, rows: int, seed: int = 1) -> list[Any]:
    """`count` global batches of `rows` rows."""
    generator = torch.Generator().manual_seed(seed)
    return [MODELS[name][1](generator, rows) for _ in range(count)]
