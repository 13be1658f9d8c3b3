"""The cases by name, `library/model`, without importing any library; those whose library is missing are absent."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from tests.thirdparty.built import Builder, Built

# What has to be importable, by file of models.
LIBRARIES = {
    "transformers": "transformers",
    "timm": "timm",
    "torchvision": "torchvision",
    "litgpt": "litgpt",
    "peft": "peft",
    "segmentation": "segmentation_models_pytorch",
    "lightly": "lightly",
    "monai": "monai",
    "forecasting": "pytorch_forecasting",
    "geometric": "torch_geometric",
    "diffusers": "diffusers",
    "x_transformers": "x_transformers",
}


def missing() -> list[str]:
    """Libraries that are not installed."""
    return [library for library in LIBRARIES.values() if find_spec(library) is None]


def builders() -> dict[str, Builder]:
    """What makes each case."""
    found: dict[str, Builder] = {}
    for name, library in LIBRARIES.items():
        if find_spec(library) is not None:
            models = import_module(f"tests.thirdparty.models_{name}").MODELS
            found.update({f"{name}/{model}": builder for model, builder in models.items()})
    return found


def build(name: str) -> Built:
    """The case: alike in every process that asks for it."""
    import random

    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    return builders()[name]()
