"""Blocks: the repeated modules of a network, found from the module paths of its nodes.

A block is an entry of a numbered container (``model.layers.3``) that holds submodules and has a sibling like it. Of
containers within containers the outer one counts, unless the inner entries hold nearly all of the work: then the outer
ones are stages, as in networks whose resolution falls in steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from lightning_autoparallel.fx import nodes as fxn

aten = torch.ops.aten

# An einsum is a product that is not written as one yet (``apply.einsum_form``).
MATMULS = {aten.mm.default, aten.addmm.default, aten.einsum.default, aten.convolution.default}
_PRODUCTS = MATMULS | {aten.bmm.default, aten.baddbmm.default}

_ALIKE = 0.5  # siblings share at least this part of their submodules' names
_MOST = 0.75  # inner entries with this part of the heavy operators make the outer entries stages


def find_blocks(nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """The path of its block for every node that is in one."""
    paths = {node: path for node in nodes if (path := fxn.module_path(node))}
    entries = _entries(dict.fromkeys(paths.values()))
    attention = Counter(path for node, path in paths.items() if fxn.is_attention(node))
    heavy = attention + Counter(path for node, path in paths.items() if node.target in _PRODUCTS)
    stages = {entry for entry in entries if _is_stage(entry, entries, heavy, attention)}
    found = {path: _block_of(path, entries - stages) for path in dict.fromkeys(paths.values())}
    return {node: block for node, path in paths.items() if (block := found[path]) is not None}


def _prefixes(path: str) -> list[str]:
    """``a.0.b`` -> ``a.0``: the prefixes that end with a number, the shortest first."""
    parts = path.split(".")
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()]


def _container(entry: str) -> str:
    return entry.rpartition(".")[0]


def _block_of(path: str, entries: set[str]) -> str | None:
    return next((prefix for prefix in _prefixes(path) if prefix in entries), None)


def _entries(paths: Iterable[str]) -> set[str]:
    """Entries of numbered containers that hold submodules and have a sibling with much the same ones."""
    below: dict[str, set[str]] = {}
    for path in paths:
        for prefix in _prefixes(path):
            inside = path[len(prefix) + 1 :]
            below.setdefault(prefix, set()).update([inside] if inside else [])
    containers: dict[str, list[str]] = {}
    for entry, names in below.items():
        if names:
            containers.setdefault(_container(entry), []).append(entry)
    return {entry for siblings in containers.values() for entry in siblings if _has_sibling(entry, siblings, below)}


def _has_sibling(entry: str, siblings: Sequence[str], below: Mapping[str, set[str]]) -> bool:
    return any(
        len(below[entry] & below[other]) >= _ALIKE * len(below[entry] | below[other])
        for other in siblings
        if other != entry
    )


def _is_stage(entry: str, entries: set[str], heavy: Counter[str], attention: Counter[str]) -> bool:
    """Whether the entries inside of ``entry`` hold all of its attention and most of its heavy operators."""
    inner = {other for other in entries if other.startswith(f"{entry}.")}
    total, inside = (_count(heavy, {entry}), _count(heavy, inner))
    return bool(inner) and inside >= _MOST * total and _count(attention, inner) == _count(attention, {entry})


def _count(counts: Counter[str], entries: set[str]) -> int:
    return sum(count for path, count in counts.items() if not entries.isdisjoint([path, *_prefixes(path)]))
