"""What besides the batch changes the graph of a module's step: its submodules, their classes and modes, frozen
parameters.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import getitem, is_, is_not
from typing import Any

from torch import Tensor, nn


class Numbers:
    """Numbers for sequences of objects, told apart by identity: equal on ranks that meet them alike."""

    def __init__(self) -> None:
        self._known: list[Sequence[Any]] = []

    def number(self, found: Sequence[Any]) -> int:
        """0 for the first one met, 1 for the next that differs in any object, and so on."""
        for number, known in enumerate(self._known):
            if len(known) == len(found) and all(map(is_, known, found)):
                return number
        self._known.append(found)
        return len(self._known) - 1


class Structures:
    """Numbers for the sets of modules that a module was made of, each of a class that has a ``forward``."""

    def __init__(self) -> None:
        self._known: list[list[weakref.ref[nn.Module]]] = []
        self._codes = Numbers()

    def number(self, modules: Sequence[nn.Module]) -> tuple[int, int]:
        """Of the objects, and of what their classes are."""
        return self._of_objects(modules), self._codes.number([*map(type, modules), *forwards(modules)])

    def _of_objects(self, modules: Sequence[nn.Module]) -> int:
        for number, known in enumerate(self._known):
            if len(known) == len(modules) and all(map(is_, (ref() for ref in known), modules)):
                return number
        self._known.append([weakref.ref(module) for module in modules])
        return len(self._known) - 1


def forwards(modules: Iterable[nn.Module]) -> list[Any]:
    """What each class of theirs computes."""
    return [_forward_of(kind) for kind in dict.fromkeys(map(type, modules))]


def _forward_of(kind: type) -> Any:
    """As its class holds it: what Python gives of some descriptors is new each time."""
    return next((vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)), None)


_TABLES = ("_modules", "_parameters", "_buffers")


class ModuleStates:
    """The key of one module's state, read without walking the module again while its parts are the same.

    ``parameters`` and ``buffers``, by name, are those as of the last ``key``.
    """

    parameters: tuple[nn.Parameter, ...]
    buffers: Mapping[str, Tensor]

    def __init__(self, module: nn.Module) -> None:
        self._module, self._structures = module, Structures()
        self._walk()

    @property
    def parts(self) -> Hashable:
        """As of the last ``key``: equal while the module has the same submodules and names of parameters."""
        return self._names, self._structure

    def key(self) -> Hashable:
        """Equal for states that share a graph."""
        if (
            any(map(is_not, map(getitem, self._holders, self._names_of_tables), self._held))
            or any(map(is_not, map(type, self._modules), self._kinds))
            or any(map(is_not, forwards(self._modules), self._forwards))
            or self._dtypes != [parameter.dtype for parameter in self.parameters]
            or any(map(is_not, self._now(), self._parts))
            or any(self._empty)
            or sum(map(len, self._tables)) != len(self._parts)
        ):
            self._walk()
        training = tuple([own.get("training") for own in self._attributes])  # what torch.compile gives has none
        return (
            self._names,
            self._structure,
            training,
            tuple([parameter.requires_grad for parameter in self.parameters]),
        )

    def _now(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._tables))

    def _walk(self) -> None:
        modules = list(self._module.modules())
        self._structure = self._structures.number(modules)
        self._modules, self._kinds, self._forwards = modules, list(map(type, modules)), forwards(modules)
        self._attributes = [vars(module) for module in modules]
        self._holders = [own for own in self._attributes for _ in _TABLES]
        self._names_of_tables = [name for _ in self._attributes for name in _TABLES]
        tables = self._held = list(map(getitem, self._holders, self._names_of_tables))
        self._tables = [table for table in tables if table]
        self._empty = [table for table in tables if not table]
        self._parts = list(self._now())
        self.parameters, self.buffers = tuple(self._module.parameters()), dict(self._module.named_buffers())
        self._dtypes = [parameter.dtype for parameter in self.parameters]
        names = [*(name for name, _ in self._module.named_parameters()), *self.buffers]
        text = repr((names, self._dtypes, [name for name, _ in self._module.named_modules()]))
        self._names = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()  # equal on all ranks
