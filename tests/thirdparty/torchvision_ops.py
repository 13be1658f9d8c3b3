"""Imported ahead of anything that imports torchvision, as Lightning's metrics do.

The registry holds a torchvision built for CUDA: beside a CPU build of torch its operators do not load, and its import
fails at those that it names. They are declared here then, without code: nothing in these models calls them in training.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

NAMED_AT_IMPORT = ("nms", "qnms")


def _declare_missing() -> None:
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        for name in NAMED_AT_IMPORT:
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_declare_missing()
