"""``einsum`` of two operands as views and one ``mm``: the form it was captured in, on local shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from lightning_autoparallel.apply.emit import GraphEmitter

aten = torch.ops.aten


def emit_product(emitter: GraphEmitter, equation: str, left: fx.Node, right: fx.Node, name: str) -> fx.Node:
    """The product as one matrix product of flattened operands, with the letters of the result in its order.

    Letters of one operand that are kept must stand together on one side of those that are summed over, and the result
    must hold one operand's letters before the other's, as captured products do.
    """
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    if not output.startswith(_kept(terms[0], output)):
        terms, left, right = terms[::-1], right, left
    summed = [letter for letter in terms[0] if letter not in output]
    rows, columns = _kept(terms[0], output), _kept(terms[1], output)
    assert output == rows + columns, f"{equation} is no matrix product"
    sizes = {
        letter: size
        for term, node in zip(terms, (left, right), strict=True)
        for letter, size in zip(term, node.meta["val"].shape, strict=True)
    }
    a = _matrix(emitter, left, terms[0], [list(rows), summed], sizes)
    b = _matrix(emitter, right, terms[1], [summed, list(columns)], sizes)
    shape = [sizes[letter] for letter in output]
    if len(rows) == len(columns) == 1:
        return emitter.call(aten.mm.default, a, b, name=name)
    return emitter.view(emitter.call(aten.mm.default, a, b), shape, name=name)


def _kept(term: str, output: str) -> str:
    return "".join(letter for letter in term if letter in output)


def _matrix(
    emitter: GraphEmitter, node: fx.Node, term: str, sides: Sequence[Sequence[str]], sizes: dict[str, int]
) -> fx.Node:
    """``node`` flattened to two dims, the letters of ``sides[0]`` in the first."""
    rows, columns = ("".join(side) for side in sides)
    shape = [math.prod(sizes[letter] for letter in side) for side in (rows, columns)]
    if term == rows + columns:
        return emitter.view(node, shape)
    assert term == columns + rows, f"letters of {term} do not fall into {rows} and {columns}"
    return emitter.call(aten.t.default, emitter.view(node, shape[::-1]))
