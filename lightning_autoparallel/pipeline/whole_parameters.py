"""Eager code on parameters that lie in shards: it computes with whole tensors, and changes shards.

What cannot be captured runs as it is written. It meets DTensors where one device has plain tensors, which torch does
not mix. While ``WholeParameters`` is open, a torch call that computes with a DTensor is given the whole tensor,
gathered for it; its gradient is the mean over the batch shards, cut as the parameter is. A call that changes a DTensor
in place changes this rank's shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import GetSetDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_autoparallel.capture.sources import user_line
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.pipeline.agreement import ControlGroup, StepIdentity, other_place
from lightning_autoparallel.pipeline.backward_calls import END, BackwardCalls
from lightning_autoparallel.pipeline.hooks_on_shards import hooks_on_shards
from lightning_autoparallel.pipeline.owed_gradients import Addend, OwedGradients, cut_like
from lightning_autoparallel.pipeline.own_writes import OwnWrites
from lightning_autoparallel.pipeline.plain_gradients import plain_gradients_refused
from lightning_autoparallel.pipeline.renormed_rows import LOOKING_UP, scaled, scales_rows
from lightning_autoparallel.pipeline.whole_tensor import WholeTensor
from lightning_autoparallel.torch_compat.assignments import set_data
from lightning_autoparallel.torch_compat.autograd import has_hooks, hooked_as
from lightning_autoparallel.torch_compat.dtensors import copied, is_copied
from lightning_autoparallel.torch_compat.interception import (
    innermost,
    inside_of,
    is_wrapped,
    without_function_modes,
    without_transforms,
)
from lightning_autoparallel.torch_compat.tree import tree_flatten, tree_map

# Questions about a tensor, ways to its own memory, and autograd's functions: they are asked of the DTensor itself.
OF_THE_TENSOR_ITSELF = {
    *("__get__", "__hash__", "__deepcopy__", "__reduce_ex__", "_is_view", "data_ptr", "detach", "detach_"),
    *("dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_shared"),
    *("ndimension", "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook"),
    *("requires_grad_", "retain_grad", "share_memory_", "size", "stride", "untyped_storage"),
}
_COMPUTED = {"T", "mT", "H", "mH", "real", "imag"}  # properties that are a tensor of their own
_GOING_ON = ("parameter ", "a tensor of shape ", "a collective of all ranks: ", "the end of ")
_PARAMETER, _TENSOR, COLLECTIVE, _ = _GOING_ON
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_MANY_AT_ONCE = ("_foreach_", "_fused_")  # of optimizers, which know what DTensors are
# In place and element by element: each rank does its part of them.
_ELEMENTWISE = {
    *("add_", "addcdiv_", "addcmul_", "clamp_", "clamp_max_", "clamp_min_", "copy_", "div_", "fill_", "lerp_", "mul_"),
    *("neg_", "sub_", "zero_", "__iadd__", "__imul__", "__isub__", "__itruediv__"),
}


@dataclass(frozen=True)
class _Gathered:
    """A DTensor and its whole tensor; ``version`` counts the changes of that when it was gathered, if they count."""

    source: DTensor
    whole: Tensor
    version: int | None

    @property
    def is_changed(self) -> bool:
        """Whether somebody has written into the whole tensor, or into a view of it."""
        return self.version is not None and self.whole._version != self.version


class WholeParameters(TorchFunctionMode):
    """A torch function mode, open while eager code of ``module`` runs.

    A parameter is gathered once between two changes of it. What is written into a whole tensor, by a view of it say, is
    written into the shards before anybody reads them. Ranks agree on each gather: where they come to different ones,
    or only some to any, all of them take part in each. Gradients reach the shards when a backward has ended.
    Nothing is done while it is paused.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        control: ControlGroup,
        addend: Addend | None = None,
        writes: OwnWrites | None = None,
    ) -> None:
        super().__init__()
        self._writes = writes
        if writes is not None:
            writes.holders.add(self)
        self._module, self._mesh, self._control = module, mesh, control
        self._paused = self._is_given = False
        self._wholes: dict[Any, _Gathered] = {}
        self._leaves: dict[int, tuple[Tensor, Tensor]] = {}  # parameters that autograd follows -> wholes in their place
        self._names: dict[Any, tuple[str, DTensor]] = {}  # parameters by their memory
        self.backwards = BackwardCalls(control)
        self.owed = OwedGradients(mesh, control, self.backwards, addend)

    def __exit__(self, *error: Any) -> None:
        self.forget()
        super().__exit__(*error)

    def start(self) -> None:
        """Another step begins."""
        self.forget()
        self.owed.clear()
        self.backwards.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For code that knows what DTensors are and leaves parameters as they are: the engine's."""
        self.write_back()
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def changing(self) -> contextlib.AbstractContextManager[None]:
        """For code that knows what DTensors are and changes them: optimizers."""
        return self._set(True)

    def resumed(self) -> contextlib.AbstractContextManager[None]:
        """For code of the step that such code calls."""
        return self._set(False)

    @contextlib.contextmanager
    def _set(self, paused: bool) -> Iterator[None]:
        self.forget()
        before, self._paused = self._paused, paused
        try:
            yield
        finally:
            self._paused = before
            self.forget()

    def data_of(self, tensor: Tensor) -> Tensor:
        """``tensor.data``; of a whole tensor, or of a view of it, one by which changes are seen."""
        has_storage = not isinstance(tensor, DTensor) and tensor.layout == torch.strided
        if has_storage and _storage(tensor) in {_storage(gathered.whole) for gathered in self._wholes.values()}:
            return tensor.detach()
        return tensor.data

    def note_changed(self, tensors: Sequence[Tensor]) -> bool:
        """These were written into by what torch does not count; whether that is memory of parameters' wholes."""
        plain = [t for t in tensors if t.layout == torch.strided and not isinstance(t, DTensor) and not is_wrapped(t)]
        memory = set(map(_storage, plain)) if self._wholes else set()
        found = [each.whole for each in self._wholes.values() if _storage(each.whole) in memory]
        increment_version([whole for whole in found if not whole.is_inference()])
        return bool(found)

    def forget(self) -> None:
        """Parameters change, or nobody needs them whole any more."""
        self.write_back()
        self._wholes.clear()
        self._leaves.clear()

    def write_back(self) -> None:
        """What was written into whole tensors is in the shards."""
        changed = [(key, gathered) for key, gathered in self._wholes.items() if gathered.is_changed]
        for key, gathered in changed:
            with without_function_modes(), torch.no_grad():
                gathered.source.detach().copy_(cut_like(gathered.whole, gathered.source))
            self.wrote(gathered.source, [gathered.whole])
            self._wholes[key] = replace(gathered, version=gathered.whole._version)
            self._drop_other_wholes(key)

    def wrote(self, target: DTensor, values: Sequence[Any], of: str = "") -> None:
        """These are written into it, or decide what is."""
        if self._writes is not None:
            memory, other = _memory(target)[:-1], f"{_TENSOR}{list(target.shape)}"
            parameter = target if isinstance(target, nn.Parameter) else None  # which may hold other memory by then

            def name() -> str:
                own = self._name_at(memory if parameter is None else _memory(parameter)[:-1])
                return f"{of}{_PARAMETER}{own}" if own else f"{of}{other}"

            self._writes.note(name, target, values)

    def _drop_other_wholes(self, kept: Any) -> None:
        """Other wholes of memory that has changed are not what it holds now."""
        for key in [key for key in self._wholes if key != kept and key[0] == kept[0]]:
            del self._wholes[key]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in ("backward", "grad") and not self._paused and not isinstance(func, GetSetDescriptorType):
            return self._differentiate(func, name, args, kwargs)
        if self._paused or not (_has_dtensor(args) or _has_dtensor(tuple(kwargs.values()))):
            if not self._paused and _meets_wrapped_shards((*args, *kwargs.values())):
                raise _transformed()
            is_hung = name == "register_hook" and len(args) == 2 and not self._paused
            return func(args[0], self.seen_in(args[1])) if is_hung else func(*args, **kwargs)
        if name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") in _COMPUTED:
            return func(*map(self._whole_of, args))
        if name == "__deepcopy__" and is_copied(args[0]):
            self.write_back()
            return copied(*args)
        if name in OF_THE_TENSOR_ITSELF:
            return func(*args, **kwargs)
        if name in LOOKING_UP and scales_rows(args, kwargs):
            return self._scaled(func, args, kwargs)
        if name == "__set__":
            return self._assign(func, *args)
        if name.startswith(_MANY_AT_ONCE):
            return self._many(func, name, args, kwargs)
        if changes_first(name) and _has_dtensor(args[:1]):
            return self._change(func, name, args, kwargs)
        return func(*tree_map(self._whole_of, args), **tree_map(self._whole_of, kwargs))

    def whole(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a torch function is given in place of ``args``; containers without a DTensor are the same."""
        wholes = (tree_map(self._whole_of, each) if _has_dtensor((each,)) else each for each in args)
        return args if self._paused else tuple(wholes)

    def seen_in(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which sees whole tensors also where it is called in a backward, which this mode has called."""

        def seeing(*args: Any, **kwargs: Any) -> Any:
            with contextlib.nullcontext() if self._paused else inside_of(self):
                return function(*args, **kwargs)

        return seeing

    @contextlib.contextmanager
    def given(self, leaves: Sequence[tuple[DTensor, Tensor]]) -> Iterator[None]:
        """For the backward of a function that was given wholes of parameters, which it may compute with again."""
        before = self._wholes, self._leaves, self._is_given
        self._wholes = {_memory(p): _Gathered(p, leaf.detach(), leaf._version) for p, leaf in leaves}
        self._leaves, self._is_given = {id(p): (p, leaf) for p, leaf in leaves}, True
        try:
            with inside_of(self):
                yield
        finally:
            self._wholes, self._leaves, self._is_given = before

    def _differentiate(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._is_given:
            args, kwargs = tree_map(lambda leaf: self._leaves.get(id(leaf), (leaf, leaf))[1], (args, kwargs))
            with hooked_as(self._leaves.values() if name == "grad" else ()):  # backward leaves that to the outer one
                return func(*args, **kwargs)
        return self._backward(func, args, kwargs) if name == "backward" else self.owed.gradients(func, args, kwargs)

    def _backward(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Gradients add up where they lie, and hooks may step optimizers: what was gathered before is old."""
        self.forget()
        trained = [p for p in self._module.parameters() if isinstance(p, DTensor) and p.requires_grad]
        try:
            hooked = [p for p in trained if has_hooks(p)]
            with plain_gradients_refused(trained, self._place), hooks_on_shards(hooked, self._meet_in_hook):
                self.owed.backward(func, args, kwargs, hooked)
        finally:
            self.forget()

    def _meet_in_hook(self, function: str) -> None:
        """Ahead of a call that all ranks take part in, or none.

        Raises:
            OtherRankError: another rank is elsewhere.
        """
        place = f"{user_line()}, where a hook gives {function} a gradient or parameter that lies in shards"
        if not self._control.agrees(place):
            raise other_place(self._control.gather(place))

    def _scaled(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        whole, rest = self._whole_of(args[1]), tree_map(self._whole_of, (args[2:], kwargs))
        self.agree(f"a call that scales the rows that it looks up in {self._place(args[1])}")
        return scaled(func, (args[0], whole, *rest[0]), rest[1], self._control)

    def _whole_of(self, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        if is_wrapped(leaf):
            raise _transformed()
        with without_transforms():
            return self._whole_tensor(leaf)

    def _whole_tensor(self, leaf: DTensor) -> Tensor:
        self.write_back()
        is_followed = torch.is_grad_enabled() and leaf.requires_grad and not torch.is_inference_mode_enabled()
        if not is_followed:
            return self._gathered(leaf).whole
        while id(leaf) not in self._leaves:
            if self.agree(self._place(leaf)):
                if not isinstance(leaf, nn.Parameter) or self._parameter_of(leaf) is not leaf:
                    return self._gather(leaf)
                self._lend(leaf)  # type: ignore[arg-type]
        return self._leaves[id(leaf)][1]

    def _gathered(self, tensor: DTensor) -> _Gathered:
        """The whole of it, gathered if need be; every rank takes part in that."""
        while (key := _memory(tensor)) not in self._wholes:
            if self.agree(self._place(tensor)):
                self._lend(tensor)
        return self._wholes[key]

    def _lend(self, tensor: DTensor) -> None:
        """Gather it, on all ranks, which follow it alike."""
        with torch.no_grad():
            whole = self._gather(tensor)
        counts = not torch.is_inference_mode_enabled()  # where nothing counts changes
        self._wholes[_memory(tensor)] = _Gathered(tensor, whole, whole._version if counts else None)
        parameter = self._parameter_of(tensor)
        if counts and isinstance(parameter, nn.Parameter) and parameter.requires_grad:
            self._leaves[id(parameter)] = parameter, self.owed.leaf(parameter, whole)  # type: ignore[arg-type]

    def _parameter_of(self, tensor: DTensor) -> Tensor:
        """The module's parameter that lies in the tensor's memory, else the tensor."""
        name = self._name_of(tensor)
        return tensor if name is None else self._module.get_parameter(name)

    def _place(self, tensor: DTensor) -> str:
        name = self._name_of(tensor)
        return f"{_PARAMETER}{name}" if name else f"{_TENSOR}{list(tensor.shape)}"

    def _name_of(self, tensor: DTensor) -> str | None:
        """The parameter that lies in the tensor's memory."""
        return self._name_at(_memory(tensor)[:-1])

    def _name_at(self, memory: Any) -> str | None:
        known = self._names.get(memory)
        if known is None or _memory(known[1])[:-1] != memory:  # another tensor may have been assigned to its data
            # torch.func.functional_call puts other tensors in the places of parameters
            named = [(name, p) for name, p in self._module.named_parameters() if isinstance(p, nn.Parameter)]
            self._names = {_memory(p)[:-1]: (name, p) for name, p in named if isinstance(p, DTensor)}
            known = self._names.get(memory)
        return None if known is None else known[0]

    def agree(self, place: str) -> bool:
        """Whether all ranks are here; where they are not, but could go on, each has now what any of them came for.

        Raises:
            OtherRankError: they cannot go on.
        """
        if self._control.agrees(place):
            return True
        places = self._control.gather(place)
        if not self.take_part(places):
            raise other_place(places)
        return False

    def take_part(self, places: Sequence[Any]) -> bool:
        """Gather what other ranks are about to compute with alone; False if there is nothing that would help them."""
        if not all(map(_goes_on, places)):
            return False
        names = dict.fromkeys(name for place in places for name in self._wanted(place))
        for name in names:
            self._lend(self._module.get_parameter(name))  # type: ignore[arg-type]
        return bool(names)

    def _wanted(self, place: Any) -> list[str]:
        if isinstance(place, StepIdentity) and ":" in place.name:
            path = place.name.partition(":")[2].removesuffix(":inference")
            return [f"{path}.{name}".strip(".") for name, _ in self._module.get_submodule(path).named_parameters()]
        return [place.removeprefix(_PARAMETER)] if str(place).startswith(_PARAMETER) else []

    def _gather(self, tensor: Tensor) -> Tensor:
        return WholeTensor.apply(tensor, self._mesh)  # type: ignore[no-any-return, no-untyped-call]

    def _assign(self, func: Callable[..., Any], target: Any, value: Any) -> None:
        """``parameter.data = tensor`` and ``parameter.grad = tensor``."""
        self.forget()
        if func == _SET_DATA and isinstance(target, DTensor):
            set_data(target, value)  # of a DTensor it would change what autograd sees, and leave the shard as it is
        elif isinstance(target, DTensor) and isinstance(value, Tensor) and not isinstance(value, DTensor):
            func(target, cut_like(value, target))
        else:
            func(target, value if isinstance(target, DTensor) else self._whole_of(value))
        self.forget()

    def _change(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.forget()
        try:
            return self._changed(func, name, args, kwargs)
        finally:
            self._wholes.clear()  # gathered for this call, some of them before the change
            self._leaves.clear()

    def _many(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function of lists of tensors: one of shards alone is torch's own matter, one of both gets whole ones.

        Where it changes its first list in place, shards stay shards, and are met by parts of the others.
        """
        lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
        is_alike = all(isinstance(leaf, DTensor) for leaf in _tensors(lists) if leaf.dim())
        is_alike &= not changes_first(name) or all(map(_are_cut_alike, zip(*lists, strict=False)))
        if is_alike or name.startswith("_fused_"):
            self.forget()
            if changes_first(name) and _has_dtensor(args[0][:1]):
                self.wrote(args[0][0], tree_flatten((args[1:], kwargs))[0])
            return func(*args, **kwargs)
        if not changes_first(name):
            return func(*tree_map(self._whole_of, args), **tree_map(self._whole_of, kwargs))
        for i in range(len(args[0])):
            one = getattr(Tensor, name.removeprefix("_foreach_"))
            rest = [value[i] if isinstance(value, (list, tuple)) else value for value in args[1:]]
            named = {key: value[i] if isinstance(value, (list, tuple)) else value for key, value in kwargs.items()}
            self.__torch_function__(one, (), (args[0][i], *rest), named)
        return None

    def _changed(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target: DTensor = args[0]
        values = tree_flatten((args[1:], kwargs))[0]
        if name == "fill_" and (numbers := _tensors(values)):  # torch has no rule for a number that is a tensor
            func, name, args, kwargs = Tensor.copy_, "copy_", (target, numbers[0].expand(target.shape)), {}
        if name in _ELEMENTWISE and all(_fits(leaf, target) for leaf in _tensors((args, kwargs))):

            def cut(leaf: Any) -> Any:
                is_whole = isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.dim() > 0
                return cut_like(leaf, target) if is_whole else leaf

            self.wrote(target, values)
            return func(*tree_map(cut, args), **tree_map(cut, kwargs))
        whole = self._gather(target.detach())
        func(whole, *tree_map(self._whole_of, args[1:]), **tree_map(self._whole_of, kwargs))
        with torch.no_grad():
            target.copy_(cut_like(whole, target))
        self.wrote(target, [whole])
        return target


def _goes_on(place: Any) -> bool:
    """Whether a rank at that place will ask the others again."""
    if isinstance(place, StepIdentity):
        return ":" in place.name
    return isinstance(place, str) and place != END and place.startswith(_GOING_ON)


def _memory(tensor: DTensor) -> Any:
    """What tells tensors apart that hold the same."""
    with torch.no_grad():
        local = tensor.to_local()
    # The storage's own identity: a rank may hold nothing of several parameters, all at address 0.
    memory = local.untyped_storage()._cdata
    return memory, local.storage_offset(), tuple(tensor.shape), tensor.placements, torch.is_inference_mode_enabled()


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _has_dtensor(values: Sequence[Any]) -> bool:
    return any(
        isinstance(value, DTensor) or (isinstance(value, (list, tuple)) and _has_dtensor(value)) for value in values
    )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _are_cut_alike(tensors: Sequence[Any]) -> bool:
    return len({tensor.placements for tensor in tensors if isinstance(tensor, DTensor) and tensor.dim()}) <= 1


def _meets_wrapped_shards(values: Sequence[Any]) -> bool:
    """Whether shards that transforms have wrapped, which makes them look plain, meet what is no shard."""
    if not any(isinstance(value, Tensor) and is_wrapped(value) for value in values):
        return False
    kinds = [isinstance(innermost(value), DTensor) for value in values if isinstance(value, Tensor) and value.dim()]
    return any(kinds) and not all(kinds)


def _transformed() -> CaptureError:
    return CaptureError(
        f"{user_line()} transforms (torch.func) a function of parameters that lie in shards: give it whole "
        "ones, {name: p.detach().clone() for name, p in module.named_parameters()}"
    )


def _fits(tensor: Tensor, target: DTensor) -> bool:
    """Whether each rank's part of ``target`` meets the same part of ``tensor``."""
    if isinstance(tensor, DTensor) and tensor.placements != target.placements:
        return False
    return tensor.dim() == 0 or tensor.shape == target.shape


def changes_first(name: str) -> bool:
    """Whether a function of torch, by its name, writes into its first argument."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name in _ELEMENTWISE)
