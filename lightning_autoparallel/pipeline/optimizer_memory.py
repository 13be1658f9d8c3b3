"""Bytes of optimizer state, from one step of the module's own optimizers on shards that hold no data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autoparallel.contracts import ParameterReport
from lightning_autoparallel.errors import ConfigError
from lightning_autoparallel.torch_compat.tracing import FakeTensorMode


class OptimizerProbe:
    """Lets optimizers be made over stand-ins of a module's parameters, and later looks at what they keep for each.

    The stand-ins are fake tensors on the CPU: optimizers that refuse the meta device, as fused ones do, accept them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # optimizers mix in real numbers of their own, such as step counts
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._names: dict[int, str] = {}
        self._stand_ins: dict[int, nn.Parameter] = {}  # by the id of the parameter they stand for

    @property
    def names(self) -> Mapping[int, str]:
        """The name of the parameter that each stand-in is there for, by the stand-in's id."""
        return self._names

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Inside, the module's parameters are stand-ins of their global shapes; tied ones stay tied."""
        owners = [submodule._parameters for submodule in self._module.modules()]
        before = [dict(parameters) for parameters in owners]
        self._make_stand_ins()
        for parameters in owners:
            for attribute, parameter in list(parameters.items()):
                parameters[attribute] = None if parameter is None else self._stand_ins[id(parameter)]
        try:
            yield
        finally:
            for parameters, original in zip(owners, before, strict=True):
                parameters.update(original)

    def state_bytes(self, optimizers: Sequence[Optimizer], parameters: Mapping[str, ParameterReport]) -> dict[str, int]:
        """Bytes per rank and parameter that the optimizers keep after a step; numbers such as step counts are left out.

        Raises:
            ConfigError: an optimizer was not made over the stand-ins, or cannot step without real values.
        """
        try:
            return self._probe(optimizers, parameters)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"the bytes of optimizer state are not known: a step of {_names_of(optimizers)} on tensors without "
                f"values failed ({type(error).__name__}: {error})"
            ) from error

    def _make_stand_ins(self) -> None:
        for name, parameter in self._module.named_parameters():
            with self._fake_mode:
                value = torch.empty(parameter.shape, dtype=parameter.dtype)
            self._stand_ins[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            self._names[id(self._stand_ins[id(parameter)])] = name

    def _probe(self, optimizers: Sequence[Optimizer], parameters: Mapping[str, ParameterReport]) -> dict[str, int]:
        found: dict[str, int] = {}
        for optimizer in optimizers:
            shards: dict[str, nn.Parameter] = {}
            for group in optimizer.param_groups:
                names = [self._name_of(parameter, optimizer) for parameter in group["params"]]
                shards.update(self._shards(names, parameters))
                # one of each kind steps for all: optimizers tell parameters of a group apart by their tensors only
                group["params"] = list({id(shards[name]): shards[name] for name in names}.values())
            optimizer.step()
            for name, shard in shards.items():
                found[name] = found.get(name, 0) + tensor_bytes(optimizer.state[shard])
        return found

    def _shards(self, names: Sequence[str], parameters: Mapping[str, ParameterReport]) -> dict[str, nn.Parameter]:
        """A stand-in of each parameter's shard; parameters of one shape share theirs."""
        by_kind: dict[tuple[object, ...], nn.Parameter] = {}
        shards = {}
        for name in names:
            report = parameters[name]
            kind = (report.local_shape, report.dtype, report.gradient_bytes > 0)
            if kind not in by_kind:
                by_kind[kind] = self._shard(report)
            shards[name] = by_kind[kind]
        return shards

    def _name_of(self, parameter: Tensor, optimizer: Optimizer) -> str:
        name = self._names.get(id(parameter))
        if name is None:
            raise ConfigError(
                f"the bytes of optimizer state are not known: {type(optimizer).__name__} holds a tensor of shape "
                f"{tuple(parameter.shape)} that is no parameter of the module"
            )
        return name

    def _shard(self, report: ParameterReport) -> nn.Parameter:
        with self._fake_mode:
            shard = nn.Parameter(torch.empty(report.local_shape, dtype=getattr(torch, report.dtype)))
            # a parameter that gets no gradient is skipped by optimizers, which then keep nothing for it
            shard.grad = torch.empty_like(shard) if report.gradient_bytes else None
        return shard


def tensor_bytes(state: Mapping[str, object]) -> int:
    """Of all tensors that an optimizer keeps for a parameter; numbers such as step counts are none."""
    tensors = [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _names_of(optimizers: Sequence[Optimizer]) -> str:
    return ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
