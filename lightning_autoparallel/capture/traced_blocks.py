"""Repeated blocks are traced once: ``traced_once`` puts stand-ins in place of calls that a template describes.

The step runs once to see what blocks are called with. The first and the last block of a group are always traced
themselves, as are calls that differ from the template's in anything that code could notice.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_autoparallel.capture.block_calls import BlockInputs, BlockResults
from lightning_autoparallel.capture.repeats import same_value
from lightning_autoparallel.capture.side_ways import SideWays, WatchedCall
from lightning_autoparallel.capture.templates import Template, TemplateCopies, make_template
from lightning_autoparallel.torch_compat.block_operators import BlockCall, call_block
from lightning_autoparallel.torch_compat.constants import copy_constant

Forward = Callable[..., Any]


@dataclass
class _Seen:
    """What the trial run learned of one group."""

    paths: list[str]
    inputs: BlockInputs | None = None
    results: BlockResults | None = None
    call: WatchedCall | None = None
    clean: bool = True  # as far as the call itself tells

    @property
    def usable(self) -> bool:
        """Whether the watched call, if there was one by now, left nothing behind but its results."""
        return self.clean and not (self.call is not None and self.call.has_side_ways)


@dataclass
class RepeatedBlocks:
    """The groups of one module's equal blocks, the templates made of them, and the calls that stand-ins took."""

    module: nn.Module
    groups: Sequence[Sequence[str]]
    recorded: Callable[[], int]  # how many effects the step has had
    templates: list[Template] = field(default_factory=list)
    _by_group: dict[int, int] = field(default_factory=dict)
    _calls: dict[int, str] = field(default_factory=dict)
    _side_ways: SideWays = field(default_factory=SideWays)

    def make_templates(self, run: Callable[[], object], decompositions: dict[Any, Callable[..., Any]]) -> None:
        """Run the step once on fake tensors, skipping repeats, and trace one block of every group."""
        seen = [_Seen(list(paths)) for paths in self.groups]
        trials = {path: self._trial(group, path) for group in seen for path in group.paths}
        with self._patched(trials), self._side_ways:
            self._side_ways.sees(run())
        for number, group in enumerate(seen):
            if group.usable and group.inputs is not None and group.results is not None:
                block = self.module.get_submodule(group.paths[1])
                made = make_template(group.paths[1], block, group.inputs, group.results, decompositions)
                if made is not None:
                    self._by_group[number] = len(self.templates)
                    self.templates.append(made)

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Inside, calls of blocks that a template describes leave one node each in the traced graph."""
        forwards: dict[str, Callable[[Forward], Forward]] = {}
        for number, template in self._by_group.items():
            first, *middle, _ = self.groups[number]
            reference: list[BlockInputs] = []
            forwards[first] = self._noted(first, reference)
            forwards |= {path: self._stand_in(path, template, reference) for path in middle}
        with self._patched(forwards):
            yield

    def expand(self, graph_module: fx.GraphModule) -> None:
        """Write what stand-ins stand for, in place."""
        if self._calls:
            TemplateCopies(graph_module, self.templates, self._calls).write()

    @property
    def traced_once(self) -> list[list[str]]:
        """The groups of which one block was traced for all but the first and the last."""
        return [list(self.groups[number]) for number in self._by_group]

    @contextlib.contextmanager
    def _patched(self, forwards: Mapping[str, Callable[[Forward], Forward]]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for path, wrap in forwards.items():
                block = self.module.get_submodule(path)
                vars(block)["forward"] = wrap(block.forward)
                stack.callback(vars(block).pop, "forward", None)
            yield

    def _trial(self, group: _Seen, path: str) -> Callable[[Forward], Forward]:
        block = self.module.get_submodule(path)

        def wrap(forward: Forward) -> Forward:
            def run(*args: Any, **kwargs: Any) -> Any:
                inputs = BlockInputs.of(block, args, kwargs)
                if path not in group.paths[1:-1] or not group.usable:
                    return forward(*args, **kwargs)
                if group.inputs is None:
                    return self._watched(group, inputs, lambda: forward(*args, **kwargs))
                if group.results is None or not inputs.equal(group.inputs):
                    return forward(*args, **kwargs)
                return group.results.output(inputs.tensors, [_like(made) for made in group.results.tensors])

            return run

        return wrap

    def _watched(self, group: _Seen, inputs: BlockInputs, run: Callable[[], Any]) -> Any:
        """The first call of a repeat: it must leave nothing behind but its results."""
        before = _state(self.module), random.getstate(), self.recorded()
        versions = [tensor._version for tensor in inputs.tensors]
        group.call = self._side_ways.watch(inputs.tensors)
        output = run()
        group.call.returns(output)
        clean = same_value(before[0], _state(self.module)) and before[1:] == (random.getstate(), self.recorded())
        group.inputs, group.results = inputs, BlockResults.of(output, inputs)
        same = versions == [tensor._version for tensor in inputs.tensors]
        group.clean = clean and same and group.results is not None and _differentiable_alike(group.results.tensors)
        return output

    def _noted(self, path: str, reference: list[BlockInputs]) -> Callable[[Forward], Forward]:
        block = self.module.get_submodule(path)

        def wrap(forward: Forward) -> Forward:
            def run(*args: Any, **kwargs: Any) -> Any:
                reference[:] = [BlockInputs.of(block, args, kwargs)]
                return forward(*args, **kwargs)

            return run

        return wrap

    def _stand_in(self, path: str, which: int, reference: list[BlockInputs]) -> Callable[[Forward], Forward]:
        block, template = self.module.get_submodule(path), self.templates[which]

        def wrap(forward: Forward) -> Forward:
            def run(*args: Any, **kwargs: Any) -> Any:
                inputs = BlockInputs.of(block, args, kwargs)
                if not inputs.equal(template.inputs) or not reference or not inputs.same_constants(reference[0]):
                    return forward(*args, **kwargs)
                number = len(self._calls)
                self._calls[number] = path
                made = call_block(_call_of(template, which, number), inputs.tensors)
                return template.results.output(inputs.tensors, made)

            return run

        return wrap


def _call_of(template: Template, which: int, number: int) -> BlockCall:
    return BlockCall(
        template=which,
        number=number,
        results=template.result_geometry,
        gradients=template.gradient_geometry,
        differentiated=template.differentiated,
        inputs=len(template.inputs.tensors),
    )


def _like(tensor: Tensor) -> Tensor:
    """A fake tensor of the same geometry that, as a result would, is no leaf."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    made = made.requires_grad_().clone() if tensor.requires_grad else made
    copy_constant(tensor, made)
    return made


def _differentiable_alike(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.requires_grad for tensor in tensors}) == 1


def _state(root: nn.Module) -> list[Any]:
    """What a call could leave behind in modules: their attributes, containers as they are now."""
    kept = []
    for module in root.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules", "forward"):
                kept.append((name, value.copy() if isinstance(value, (list, dict, set)) else value))
        kept += [(name, id(buffer)) for name, buffer in module._buffers.items()]
    return kept
