"""Which dim of a step's results is the batch: the one that grows where the batch grows.

A length alone does not tell: as many classes as rows are no rows. So where a result is as long as the batch, the step
runs once more on fake tensors of twice the rows. So does an evaluation with as many results as rows: a list of one for
each row of the whole batch, each of them whole, is what no rank should return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_autoparallel.errors import CaptureError

Shapes = Sequence[tuple[int, ...]]


def batch_dims_of(
    names: Callable[[int], str],
    shapes: Shapes,
    lengths: set[int],
    of_twice_the_rows: Callable[[], Shapes],
    training: bool = True,
) -> list[int | None]:
    """For each of the results of ``shapes`` the first dim that is the batch, None where none is.

    ``lengths`` are those of the batch, ``names`` says for messages what a result is.

    Raises:
        CaptureError: a result is as long as the batch, and the step does not run on another number of rows; or there
            is a result for each row.
    """
    alike = next((i for i, shape in enumerate(shapes) if lengths & set(shape)), None)
    as_many = not training and any(1 < length <= len(shapes) for length in lengths)
    if alike is None and not as_many:
        return [None] * len(shapes)
    try:
        grown = of_twice_the_rows()
    except Exception as error:
        if alike is None:
            return [None] * len(shapes)
        raise CaptureError(f"{_unknown(names(alike), shapes[alike])} (twice as many: {error})") from error
    if as_many and len(grown) > len(shapes):
        raise CaptureError(
            f"{names(0)} is one of {len(shapes)}, of which more rows make more: of each row of the whole batch, where "
            "every rank should have those of its own; return one tensor for all rows"
        )
    if alike is not None and [len(shape) for shape in grown] != [len(shape) for shape in shapes]:
        raise CaptureError(_unknown(names(alike), shapes[alike]))
    if alike is None:
        return [None] * len(shapes)
    return [_grown_dim(shape, twice, lengths) for shape, twice in zip(shapes, grown, strict=True)]


def _grown_dim(shape: tuple[int, ...], twice: tuple[int, ...], lengths: set[int]) -> int | None:
    sizes = enumerate(zip(shape, twice, strict=True))
    return next((dim for dim, (size, grown) in sizes if size in lengths and grown == 2 * size), None)


def _unknown(name: str, shape: tuple[int, ...]) -> str:
    return (
        f"{name} has shape {list(shape)}, in which one dim is as long as the batch, but whether it is the batch cannot "
        "be told: the step works with this number of rows only; take sizes from the batch's tensors, or return a "
        "tensor without such a dim"
    )
