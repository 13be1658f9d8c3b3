"""Gradients that come to shards as plain tensors: of one rank's rows, where nothing has reduced them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from torch.distributed.tensor import DTensor

from lightning_autoparallel.capture.sources import user_line
from lightning_autoparallel.errors import CaptureError


@contextlib.contextmanager
def plain_gradients_refused(parameters: Sequence[DTensor], place: Callable[[DTensor], str]) -> Iterator[None]:
    """Around a backward; a plain gradient that was there before is the user's.

    Raises:
        CaptureError: a parameter has got one, said by its ``place``.
    """
    before = {id(parameter) for parameter in parameters if _has_plain(parameter)}
    yield
    for parameter in parameters:
        if _has_plain(parameter) and id(parameter) not in before:
            raise CaptureError(
                f"{user_line()}: the gradient of {place(parameter)} is that of this rank's rows alone: it came from "
                "code that is given parameters behind torch's functions (in C++, in a thread, by a name that was made "
                "of MyFunction.apply before): give it parameter.clone()"
            )


def _has_plain(parameter: DTensor) -> bool:
    return parameter.grad is not None and not isinstance(parameter.grad, DTensor)
