"""Who is measured, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lightning_autoparallel.cli.bench.measurements import OURS, Contender
from lightning_autoparallel.config import PLANS
from lightning_autoparallel.errors import ConfigError, did_you_mean

WITHOUT_ALL = "without any pass"


def baselines() -> Mapping[str, Contender]:
    """Lightning's strategies by the name ``--against`` takes."""
    contenders = (
        Contender(name="ddp", kind="ddp"),
        Contender(name="fsdp2", kind="fsdp2"),
        Contender(name="ddp-compiled", kind="ddp", compiled=True),
        Contender(name="fsdp2-compiled", kind="fsdp2", compiled=True),
    )
    return {contender.name: contender for contender in contenders}


def parse_against(text: str) -> list[Contender]:
    """The contenders of ``"ddp,fsdp2"``; none for an empty text.

    Raises:
        ConfigError: an unknown name.
    """
    known = baselines()
    names = _split(text)
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known, opening="did you mean") or f"names are {', '.join(known)}"
            raise ConfigError(f"--against names {name!r}, which is no contender: {hint}")
    return [known[name] for name in names]


def without_passes(passes: Sequence[str], disabled: Sequence[str]) -> list[Contender]:
    """This strategy with each pass switched off that the config leaves on, and with all of them off."""
    off = [
        Contender(name=f"without {name}", overrides={"disabled_passes": [*disabled, name]})
        for name in passes
        if name not in disabled
    ]
    return [*off, Contender(name=WITHOUT_ALL, overrides={"disabled_passes": list(passes)})]


def with_plans(text: str) -> list[Contender]:
    """This strategy with each plan of ``"auto,ddp"``; none for an empty text.

    Raises:
        ConfigError: an unknown name.
    """
    names = _split(text)
    for name in names:
        if name not in PLANS:
            hint = did_you_mean(name, PLANS, opening="did you mean") or f"names are {', '.join(PLANS)}"
            raise ConfigError(f"--plans names {name!r}, which is no plan: {hint}")
    return [Contender(name=f"plan {name}", overrides={"plan": name}) for name in names]


def _split(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def ours() -> Contender:
    """This strategy as the config has it: what ratios are relative to."""
    return Contender(name=OURS)


def schedule(contenders: Sequence[Contender], rounds: int) -> Iterator[tuple[int, Contender]]:
    """Contenders take turns, round by round (from 1): a machine that is busy for a while is so for all of them.

    Each round begins with another: the first one is not always the one that meets cold caches.
    """
    for turn in range(1, rounds + 1):
        first = (turn - 1) % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            yield turn, contender
