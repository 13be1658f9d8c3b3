"""The rule of matrix products of any number of dims: ``einsum`` of two operands."""

from __future__ import annotations

import torch

from lightning_autoparallel.plan.rules import OpCall, P, R, Row, S, rule

aten = torch.ops.aten


@rule(aten.einsum.default)
def einsum_rule(call: OpCall) -> list[Row]:
    """Each letter may be shared out: kept in the result it is a shard of it, summed over it makes a partial sum.

    Products are linear in each operand, so a partial sum of one stays one.
    """
    inputs, output = call.args[0].split("->")
    left, right = inputs.split(",")
    rows: list[Row] = [((P,), (P, R)), ((P,), (R, P))]
    for letter in dict.fromkeys(left + right):
        result = S(output.index(letter)) if letter in output else P
        operands = tuple(S(term.index(letter)) if letter in term else R for term in (left, right))
        rows.append(((result,), operands))
    return rows
