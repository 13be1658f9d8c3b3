"""Which stored tensor goes into which of a module's, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_autoparallel.checkpoint.stored import StoredTensors
from lightning_autoparallel.errors import CheckpointError
from lightning_autoparallel.lightning_compat import rank_zero_warn

_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Match:
    """Names of the submodule ``into`` that are read, and ``given``, all names that the tensors behind them have."""

    stored: StoredTensors
    into: str
    names: tuple[str, ...]
    given: frozenset[str]

    def load(self, module: nn.Module) -> None:
        """Fill the module's tensors, or this rank's shards of them."""
        tensors = _tensors(module.get_submodule(self.into))
        self.stored.fill({name: tensors[name] for name in self.names})


def match_names(module: nn.Module, stored: StoredTensors, into: str, strict: bool) -> Match:
    """Match a submodule's parameters and persistent buffers with stored tensors, by name.

    Raises:
        CheckpointError: a shape differs, or a dtype cannot be converted; if ``strict``, also where one side lacks what
            the other has.
    """
    specs, tensors = stored.specs, _tensors(module)
    aliases: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        aliases.setdefault(id(tensor), []).append(name)
    found = {tuple(names): [name for name in names if name in specs] for names in aliases.values()}
    missing = [stored.called(names[0]) for names, held in found.items() if not held]
    surplus = [name for name in specs if name not in tensors]
    unfit = [text for name in tensors if name in specs for text in _unfit(name, stored, tensors[name])]
    if unfit or (strict and (missing or surplus)):
        said = _does_not_fit(stored.source, into, missing, surplus, unfit, strict)
        raise CheckpointError(said + _advice(module, into, missing, surplus, only_names=not unfit))
    for what, names in (("has no", missing), ("has, and the module has not,", surplus)):
        if names:
            rank_zero_warn(f"{stored.source} {what} {_listed(names)}")
    return Match(
        stored=stored,
        into=into,
        names=tuple(held[0] for held in found.values() if held),
        given=frozenset(name for names, held in found.items() if held for name in names),
    )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: t for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}


def _unfit(name: str, stored: StoredTensors, tensor: Tensor) -> Iterable[str]:
    spec, called = stored.specs[name], stored.called(name)
    if spec.shape != tuple(tensor.shape):
        yield f"{called} has shape {spec.shape}, {tuple(tensor.shape)} in the module"
    dtype, wanted = spec.dtype, tensor.dtype
    floats = isinstance(dtype, torch.dtype) and dtype.is_floating_point and wanted.is_floating_point
    if dtype != wanted and not (floats and isinstance(dtype, torch.dtype) and dtype.itemsize > 1):
        yield f"{called} is stored as {dtype}, which is not converted to {wanted}"


def _does_not_fit(
    source: str, into: str, missing: list[str], surplus: list[str], unfit: list[str], strict: bool
) -> str:
    what = f"the submodule {into!r}" if into else "the module"
    parts = [f"{source} does not fit {what}"]
    if strict and missing:
        parts.append(f"it has no {_listed(missing)}")
    if strict and surplus:
        parts.append(f"it has {_listed(surplus)}, which the module has not")
    parts += unfit[:_SHOWN]
    if len(unfit) > _SHOWN:
        parts.append(f"and {len(unfit) - _SHOWN} more")
    return "; ".join([": ".join(parts[:2]), *parts[2:]])


def _advice(module: nn.Module, into: str, missing: list[str], surplus: list[str], only_names: bool) -> str:
    for lacking in missing[:1]:
        longer = next((name for name in surplus if name.endswith(f".{lacking}")), None)
        if longer is not None:
            return f"\nNames in the files are longer: give prefix={longer.removesuffix(f'.{lacking}')!r}"
        shorter = next((name for name in surplus if lacking.endswith(f".{name}")), None)
        if shorter is not None:
            inner = f"{into}.{lacking.removesuffix(f'.{shorter}')}".removeprefix(".")
            return f"\nNames in the files are shorter: give into={inner!r}"
    if missing and surplus and any(c.__name__ == "PreTrainedModel" for c in type(module).__mro__):
        return (
            "\nIf transformers renames or merges them when it loads this model, write them as they are in the module "
            "first: safetensors.torch.save_model(model, FILE) after from_pretrained"
        )
    return "\nstrict=False takes what both have" if only_names else ""


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
