"""What lies between two ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lightning_autoparallel.errors import ConfigError, did_you_mean

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute", "broadcast")


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """One rank's way to another: bytes in one direction, and what a hop adds to a message's way.

    ``kinds`` has what was measured of some kinds of collectives, in place of the link's own figures: a library may be
    far from a link's bandwidth in one and near to it in another.

    Raises:
        ConfigError: the bandwidth is no positive number, the latency none of 0 or more, or a kind is not known.
    """

    bandwidth_gb_per_s: float
    latency_us: float
    kinds: Mapping[str, LinkSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check("bandwidth_gb_per_s", self.bandwidth_gb_per_s, lambda value: value > 0, "a positive number")
        check("latency_us", self.latency_us, lambda value: value >= 0, "a number, 0 or more")
        for kind in self.kinds:
            if kind not in COLLECTIVES:
                known = f"kinds are {', '.join(COLLECTIVES)}{did_you_mean(kind, COLLECTIVES)}"
                raise ConfigError(f"hardware: a link has no kind of collective {kind!r}: {known}")

    def of(self, kind: str) -> LinkSpec:
        """The link as collectives of this kind find it."""
        return self.kinds.get(kind, self)

    def changed(self, key: str, given: Any) -> LinkSpec:
        """The link with the figures of a mapping; ``key`` is what messages call it.

        Raises:
            ConfigError: what is given is no mapping, or has a key that a link does not have.
        """
        known = [item.name for item in fields(self)]
        for name in mapping(key, given):
            if name not in known:
                raise ConfigError(
                    f"hardware: {key} has no key {name!r}: keys are {', '.join(known)}{did_you_mean(name, known)}"
                )
        kinds = mapping(f"{key}.kinds", given.get("kinds", {}))
        plain = replace(self, **{name: value for name, value in given.items() if name != "kinds"})
        changed = {kind: plain.of(kind).changed(f"{key}.kinds.{kind}", rates) for kind, rates in kinds.items()}
        return replace(plain, kinds={**plain.kinds, **changed})

    def as_json(self) -> dict[str, Any]:
        """All figures as numbers and mappings; ``kinds`` only where some were measured."""
        own = {"bandwidth_gb_per_s": self.bandwidth_gb_per_s, "latency_us": self.latency_us}
        kinds = {kind: link.as_json() for kind, link in self.kinds.items()}
        return {**own, "kinds": kinds} if kinds else own


def mapping(key: str, value: Any) -> Mapping[str, Any]:
    """The value, if it is a mapping.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"hardware: {key} is {value!r}, but must be a mapping")
    return value


def check(key: str, value: object, holds: Callable[[float], bool], wanted: str) -> None:
    """Refuse a figure.

    Raises:
        ConfigError: it is no finite number, or ``holds`` is not true of it.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and holds(value)):  # type: ignore[arg-type]
        raise ConfigError(f"hardware: {key} is {value!r}, but must be {wanted}")
