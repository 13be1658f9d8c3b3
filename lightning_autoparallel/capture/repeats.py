"""Which submodules of a module are the same code over again: what is traced once may stand for all of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autoparallel.capture.edges import Edges

# Under four there is nothing to gain: the first and the last are always traced themselves.
SMALLEST_GROUP = 4

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_STATE = {"_parameters", "_buffers", "_modules"}


def repeated_blocks(module: nn.Module, parameters: Mapping[str, Any], edges: Edges) -> list[list[str]]:
    """Groups of paths of sibling submodules that differ in the values of their tensors only, the outermost ones.

    ``parameters`` are the specs of the module's parameters by name. Submodules whose attributes, hooks or marked edges
    differ are no repeats: a layer that knows its number is one.
    """
    groups: list[list[str]] = []
    _search(module, "", _Comparison(parameters, edges), groups)
    return groups


def _search(parent: nn.Module, path: str, comparison: _Comparison, groups: list[list[str]]) -> None:
    children = [(f"{path}.{name}" if path else name, child) for name, child in parent.named_children()]
    alike: list[list[tuple[str, nn.Module]]] = []
    for item in children:
        group = next((group for group in alike if comparison.equal(group[0], item)), None)
        if group is None:
            alike.append([item])
        else:
            group.append(item)
    for group in alike:
        is_block = next(group[0][1].children(), None) is not None
        if len(group) >= SMALLEST_GROUP and is_block and not any(_has_hooks(child) for _, child in group):
            groups.append([name for name, _ in group])
        else:
            for name, child in group:
                _search(child, name, comparison, groups)


class _Comparison:
    def __init__(self, parameters: Mapping[str, Any], edges: Edges) -> None:
        self._parameters, self._edges = parameters, edges

    def equal(self, one: tuple[str, nn.Module], other: tuple[str, nn.Module]) -> bool:
        """Whether two (path, module) are the same code on tensors of the same geometry."""
        (path, module), (other_path, other_module) = one, other
        if type(module) is not type(other_module) or not self._equal_own(one, other):
            return False
        children, others = dict(module.named_children()), dict(other_module.named_children())
        return list(children) == list(others) and all(
            self._equal_inside((f"{path}.{name}", child), (f"{other_path}.{name}", others[name]))
            for name, child in children.items()
        )

    def _equal_inside(self, one: tuple[str, nn.Module], other: tuple[str, nn.Module]) -> bool:
        return self._edges_of(one[0]) == self._edges_of(other[0]) and self.equal(one, other)

    def _equal_own(self, one: tuple[str, nn.Module], other: tuple[str, nn.Module]) -> bool:
        (path, module), (other_path, other_module) = one, other
        attributes, others = _attributes(module), _attributes(other_module)
        return (
            attributes.keys() == others.keys()
            and all(same_value(value, others[name]) for name, value in attributes.items())
            and self._specs(path, module) == self._specs(other_path, other_module)
            and _buffer_specs(module) == _buffer_specs(other_module)
        )

    def _specs(self, path: str, module: nn.Module) -> list[Any]:
        return [(name, self._parameters.get(f"{path}.{name}")) for name in module._parameters]

    def _edges_of(self, path: str) -> list[tuple[str, str]]:
        return [edge for edge in self._edges if fnmatchcase(path, edge[1])]


def same_value(one: Any, other: Any) -> bool:
    """Whether code that reads one value does what it does with the other: one object, or plain data that is equal."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, _PLAIN):
        return bool(one == other)
    if type(one) in (list, tuple, torch.Size):
        return len(one) == len(other) and all(map(same_value, one, other))
    if type(one) in (dict, OrderedDict):
        return list(one) == list(other) and all(map(same_value, one.values(), other.values()))
    return type(one) is set and all(isinstance(item, _PLAIN) for item in one) and bool(one == other)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _STATE and not _is_hooks(name)}


def _is_hooks(name: str) -> bool:
    return name.startswith("_") and "hooks" in name


def _has_hooks(module: nn.Module) -> bool:
    """Whether somebody watches the calls of ``module`` or of what is in it."""
    tables = [(name, table) for child in module.modules() for name, table in vars(child).items() if _is_hooks(name)]
    return any(table for name, table in tables if name.startswith(("_forward", "_backward")))


def _buffer_specs(module: nn.Module) -> list[Any]:
    return [(name, _geometry(buffer)) for name, buffer in module._buffers.items()]


def _geometry(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tuple(tensor.shape), tensor.stride(), tensor.dtype)
