"""``max_norm`` of embeddings whose table lies in shards: rows that any rank looks up are scaled, on all ranks.

Torch scales the rows that are looked up before it looks. Of a table in shards a rank has all rows for the call, and
keeps some: those that others look up would be scaled in tables that are thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_autoparallel.pipeline.agreement import ControlGroup

LOOKING_UP = ("embedding", "embedding_bag")


def scales_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``torch.nn.functional`` looks rows up in shards, and scales them."""
    return kwargs.get("max_norm") is not None and len(args) > 1 and isinstance(args[1], DTensor)


def scaled(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], control: ControlGroup) -> Any:
    """The call on a whole table, in which the rows that any rank looks up are scaled; every rank calls it."""
    whole: Tensor = args[1]
    with torch.no_grad():
        mine = torch.zeros(whole.shape[0], dtype=torch.bool)
        rows = args[0].detach().flatten().cpu()
        mine[rows[(rows >= 0) & (rows < len(mine))]] = True  # torch's own call says that others are none
        looked_up = torch.tensor(control.any(mine.tolist())).nonzero().flatten().to(whole.device)
        torch.embedding_renorm_(whole.detach(), looked_up, kwargs["max_norm"], kwargs.get("norm_type", 2.0))
    return func(*args, **{**kwargs, "max_norm": None})
