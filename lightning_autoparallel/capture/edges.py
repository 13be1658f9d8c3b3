"""Marks on what goes into and comes out of modules, so that rules of a plan can name those values.

While a step is captured, chosen values pass an identity operator, and so do their gradients. In the captured graph each
of them is a call of ``aten.alias`` annotated with ``edge``: ``"outputs:layers.0.attention"``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

from lightning_autoparallel.capture.sources import user_line
from lightning_autoparallel.errors import ConfigError, closest
from lightning_autoparallel.torch_compat.constants import is_constant
from lightning_autoparallel.torch_compat.edge_marks import EDGE
from lightning_autoparallel.torch_compat.tracing import annotate_nodes
from lightning_autoparallel.torch_compat.tree import tree_flatten, tree_map, tree_unflatten

Edges = Sequence[tuple[str, str]]  # ("outputs" | "inputs", glob over module paths)
EDGE_KEY = "edge"


def check_edges(module: nn.Module, edges: Edges) -> None:
    """Every glob must match a submodule of ``module``.

    Raises:
        ConfigError: one matches nothing; the message names the nearest path.
    """
    paths = [path for path, _ in module.named_modules() if path]
    for kind, pattern in edges:
        if not any(fnmatchcase(path, pattern) for path in paths):
            nearest = closest(pattern, paths, cutoff=0)
            hint = f"nearest: {nearest}" if nearest else "the module has no submodules"
            raise ConfigError(f"rule '{kind}:{pattern}' matches no module; {hint}")


@contextlib.contextmanager
def marked_edges(module: nn.Module, edges: Edges) -> Iterator[None]:
    """While open, the floating-point tensors at the matching edges of ``module``'s submodules are marked.

    Constants, tensors that the step makes out of nothing but numbers, are not.

    Raises:
        ConfigError: inside; a module whose inputs are marked changes one of them in place.
    """
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:
        for path, submodule in module.named_modules():
            for kind in dict.fromkeys(kind for kind, pattern in edges if path and fnmatchcase(path, pattern)):
                edge = _Edge(f"{kind}:{path}", path, numbers)
                for handle in edge.hook_outputs(submodule) if kind == "outputs" else edge.hook_inputs(submodule):
                    stack.callback(handle.remove)
        yield


class _Edge:
    """One edge of one module; ``_given`` holds the marked inputs of its calls under way."""

    def __init__(self, name: str, path: str, numbers: Iterator[int]) -> None:
        self._name, self._path, self._numbers = name, path, numbers
        self._given: list[list[Tensor]] = []

    def _mark(self, value: Any) -> Any:
        # Python may read what a constant holds: it must stay the tensor that is known.
        if not isinstance(value, Tensor) or not value.is_floating_point() or is_constant(value):
            return value
        with annotate_nodes(module=self._path, source=user_line()):
            return EDGE(value, self._name, next(self._numbers))

    def hook_outputs(self, submodule: nn.Module) -> list[RemovableHandle]:
        return [submodule.register_forward_hook(lambda _, inputs, output: tree_map(self._mark, output))]

    def hook_inputs(self, submodule: nn.Module) -> list[RemovableHandle]:
        return [
            submodule.register_forward_pre_hook(self._mark_inputs, with_kwargs=True),
            submodule.register_forward_hook(self._check_inputs),
        ]

    def _mark_inputs(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given, spec = tree_flatten((args, kwargs))
        marked = [self._mark(leaf) for leaf in given]
        self._given.append([now for now, before in zip(marked, given, strict=True) if now is not before])
        return tree_unflatten(marked, spec)  # type: ignore[no-any-return]

    def _check_inputs(self, submodule: nn.Module, inputs: Any, output: Any) -> None:
        # The caller would not see the change: what the module changed is the marked value.
        if any(tensor._version for tensor in self._given.pop()):
            raise ConfigError(
                f"rule '{self._name}': {type(submodule).__name__} changes its input in place; "
                "pin the outputs of the module before it, or switch its inplace off"
            )


def is_edge(node: fx.Node) -> bool:
    """Whether a traced node is a mark."""
    return node.target is EDGE


class EdgeAliases:
    """Rewrites marks as aliases; a gradient's mark takes the annotations of the value's."""

    def __init__(self) -> None:
        self._annotations: dict[int, dict[str, Any]] = {}

    def alias(self, copied: fx.Node) -> None:
        """Turn a mark into an alias, in place."""
        value, name, number = copied.args
        custom = self._annotations.setdefault(number, {**copied.meta.get("custom", {}), EDGE_KEY: name})  # type: ignore[arg-type, dict-item]
        copied.target, copied.args = torch.ops.aten.alias.default, (value,)
        copied.meta = {**copied.meta, "custom": dict(custom)}
