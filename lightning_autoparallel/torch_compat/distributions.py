"""``torch.distributions`` checks arguments by reading their values, which a captured step cannot do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch.distributions import Distribution


@contextlib.contextmanager
def unchecked_distributions(asked: list[type]) -> Iterator[None]:
    """No distribution checks its arguments or samples inside; ``asked`` gets the kinds of those that would have."""

    def validates(distribution: Distribution) -> bool:
        if vars(distribution).get("_validate_args", before):
            asked.append(type(distribution))
        return False

    def set_to(distribution: Distribution, value: bool) -> None:
        vars(distribution)["_validate_args"] = value

    before: Any = Distribution._validate_args
    with mock.patch.object(Distribution, "_validate_args", property(validates, set_to)):
        yield
