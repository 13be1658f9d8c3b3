"""Hooks compute with parameters, which lie in shards, as if these were whole.

Torch mixes no shards with whole tensors of a hook's own, and knows no shards for some functions (``flatten`` of rows
that ranks cannot share evenly). Others do on shards what they do not on one device (``weight[5]`` is a copy).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_autoparallel.capture.sources import user_line
from lightning_autoparallel.errors import CaptureError
from lightning_autoparallel.pipeline.whole_parameters import OF_THE_TENSOR_ITSELF, WholeParameters, changes_first
from lightning_autoparallel.strategy.outside_gradients import BACKWARDS
from lightning_autoparallel.strategy.pickled_shards import pickled
from lightning_autoparallel.strategy.shard_operators import NeedsWhole, ShardOperators
from lightning_autoparallel.torch_compat.dispatch import takes_whole_for_replicas
from lightning_autoparallel.torch_compat.dtensors import copied, is_copied, part_of
from lightning_autoparallel.torch_compat.group_calls import changes_told, is_of_groups
from lightning_autoparallel.torch_compat.interception import without_function_mode
from lightning_autoparallel.torch_compat.tree import tree_leaves, tree_map

Call = Callable[..., Any]
_LEFT_ALONE = frozenset(OF_THE_TENSOR_ITSELF)
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
TO_PYTHON = ("numpy", "tolist", "__array__", "__format__")
_AS_ANOTHER = ("view_as", "reshape_as", "expand_as", "type_as")  # of whose second tensor no value is read
_DRAWN = ("rand_like", "randn_like", "randint_like")
# As torch says it.
_FOR_NO_SHARDS = (
    "Sharding propagation failed",
    "does not have a sharding strategy",
    "not supported with DTensor",
    "got mixed torch.Tensor and DTensor",
)


class MixedOperands(TorchFunctionMode):
    """Open during one hook. From the first call of torch on that shards cannot be given, calls are given whole ones.

    What they write into whole parameters, by views too, is in the shards behind that call. Every rank makes such calls,
    for which ``meet`` waits, or none. Nothing is done where ``is_inside()``: in steps, and in backwards, around which
    ``inside`` is opened, and ahead of which ``asked`` looks at what they ask for.

    Raises:
        CaptureError: autograd would have to follow parameters of such a call, whose gradients nothing would reduce, or
            a backward asks for such.
        CheckpointError: a shard is saved as an object, by a rank.
    """

    def __init__(
        self,
        parameters: WholeParameters,
        meet: Callable[[str], None],
        is_inside: Callable[[], bool],
        inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        asked: Callable[..., None] = lambda func, args, kwargs: None,
    ) -> None:
        super().__init__()
        self._asked = asked
        self._parameters, self._meet, self._is_inside, self._inside = parameters, meet, is_inside, inside
        self._gives_whole = False
        self._operators = ShardOperators()

    def __exit__(self, *error: Any) -> None:
        self._operators.forget()
        if self._gives_whole:
            self._parameters.forget()
        super().__exit__(*error)

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """For code that knows what DTensors are: steps of optimizers. What was written is in the shards."""
        if self._gives_whole:
            self._parameters.forget()
        with without_function_mode(self):
            yield

    def __torch_function__(
        self, func: Call, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = self._call(func, types, args, kwargs or {})
        if self._gives_whole and not self._is_inside():
            self._parameters.write_back()  # shards may be looked at without torch's functions, or saved
        return result

    def _call(self, func: Call, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__reduce_ex__" and isinstance(args[0], DTensor) and not self._is_inside():
            return pickled(*args)
        if name == "__deepcopy__" and is_copied(args[0]):
            with self._written_back():
                return copied(args[0], args[1])
        if name in TO_PYTHON and has_numbers(args[0], name) and not self._is_inside():
            return self._to_python(func, name, args, kwargs)
        if self._gives_whole and func == _GET_DATA and not self._is_inside():
            return self._parameters.data_of(args[0])
        if name in BACKWARDS:
            return self._differentiated(func, args, kwargs)
        tensors = list(_tensors((*args, *kwargs.values())))
        of_shards = any(isinstance(x, DTensor) for x in tensors)
        if is_of_groups(func) and (of_shards or self._gives_whole) and not self._is_inside():
            return self._joined(func, types, args, kwargs, of_shards)
        if name in _LEFT_ALONE or not of_shards or self._is_inside():
            return func(*args, **kwargs)
        if name in _AS_ANOTHER and args and not isinstance(args[0], DTensor):
            return func(*tree_map(_shape_of, args), **tree_map(_shape_of, kwargs))
        if name == "equal" and len({tensor.shape for tensor in tensors}) > 1:
            return False  # torch would cut the one as the other lies
        if name == "to" and not _are_followed(tensors):
            with self._written_back():
                moved = func(*args, **kwargs)
            if moved.device == args[0].device:  # optimizers keep what it makes of their state, in shards
                return moved
        if name == "__set__":  # shards can be assigned to
            return self._whole(func, types, args, kwargs) if self._gives_whole else func(*args, **kwargs)
        if not _are_followed(tensors):
            return self._computed(func, name, args, kwargs, _are_mixed(tensors))
        if name in _DRAWN or getattr(func, "__module__", None) == "torch.nn.init":  # autograd follows none of these
            with torch.no_grad():
                return self._computed(func, name, args, kwargs, _are_mixed(tensors))
        return self._followed(func, name, args, kwargs, _are_mixed(tensors))

    def _differentiated(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with self._inside():
                self._asked(func, args, kwargs)
                return func(*args, **kwargs)
        except RuntimeError as error:
            if not _is_for_no_shards(error):
                raise
            raise CaptureError(
                f"{user_line()} differentiates what was computed with parameters, which lie in shards, and with other "
                f"tensors, outside of a step, which torch cannot ({error}): compute it in training_step, or with "
                "parameter.detach()"
            ) from error

    def _written_back(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, what was written into whole tensors is in the shards."""
        return self._parameters.paused() if self._gives_whole else contextlib.nullcontext()

    def _to_python(self, func: Call, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Numbers of a whole tensor: of a copy that this rank has, else all ranks meet."""
        tensor: DTensor = args[0]
        if all(placement.is_replicate() for placement in tensor.placements):
            with self._written_back():
                return func(part_of(tensor), *args[1:], **kwargs)
        if not self._gives_whole:
            self._begin(name)
        with torch.no_grad():
            return self._whole(func, (), args, kwargs)

    def _computed(self, func: Call, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], are_mixed: bool) -> Any:
        if are_mixed:
            self._begin(name)
        if not self._gives_whole:
            try:
                with self._operators.during("shards"):
                    result = func(*args, **kwargs)
            except NeedsWhole:
                pass
            except (RuntimeError, NotImplementedError) as error:
                if not _is_for_no_shards(error):
                    raise
            else:
                self._note(name, args, kwargs)
                return result
            self._begin(name)
        return self._whole(func, (), args, kwargs)

    def _joined(self, func: Call, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], of_shards: bool) -> Any:
        """A collective of the user's, which is given whole tensors, and may change them.

        Raises:
            CaptureError: nobody would know when a shard may be written into.
        """
        if of_shards and func is dist.irecv:
            raise CaptureError(
                f"{user_line()} receives into a parameter or gradient, which lies in shards, without waiting: receive "
                "into a tensor of your own, and copy_ it when it has come"
            )
        if of_shards:
            self._begin(func.__name__)
        with changes_told(self._parameters.note_changed), torch.no_grad():
            return self._whole(func, types, args, kwargs) if of_shards else func(*args, **kwargs)

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What was written into shards, or copies, by what is no shard; ``nn.init`` names all that it is given."""
        if changes_first(name):
            first, *rest = tree_leaves((args, kwargs)) or [None]
            if isinstance(first, DTensor):
                self._parameters.wrote(first, rest)

    def _begin(self, name: str) -> None:
        self._meet(name)
        self._gives_whole = True

    def _whole(self, func: Call, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._operators.during("whole"):
            return self._parameters.__torch_function__(func, types, args, kwargs)

    def _followed(self, func: Call, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], are_mixed: bool) -> Any:
        if are_mixed:
            raise CaptureError(
                f"{user_line()} gives {name} a parameter, which lies in shards, and a whole tensor, outside of a step, "
                "where nobody reduces the gradient: give it parameter.detach(), or do it inside of torch.no_grad()"
            )
        try:
            with self._written_back(), self._operators.during("followed"):
                return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if not _is_for_no_shards(error):
                raise
            raise CaptureError(
                f"{user_line()} gives {name} a parameter, which lies in shards, which torch cannot do with it, outside "
                "of a step, where nobody reduces the gradient: give it parameter.detach(), or do it in torch.no_grad()"
            ) from error


def _is_for_no_shards(error: Exception) -> bool:
    return any(text in str(error) for text in _FOR_NO_SHARDS)


def has_numbers(value: Any, name: str) -> bool:
    """Whether a conversion is of the whole tensor; as text others than single numbers are shown as a DTensor is."""
    return isinstance(value, DTensor) and (name != "__format__" or value.dim() == 0)


def _shape_of(value: Any) -> Any:
    """A tensor of the shape, dtype and device of one in shards, with nothing in it; other things as they are."""
    if not isinstance(value, DTensor):
        return value
    return torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)


def _are_followed(tensors: Iterable[Tensor]) -> bool:
    """Whether autograd follows shards among them."""
    return torch.is_grad_enabled() and any(isinstance(tensor, DTensor) and tensor.requires_grad for tensor in tensors)


def _are_mixed(tensors: Iterable[Tensor]) -> bool:
    """Whether shards of one tensor meet all of another; single numbers may meet anything."""
    others = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    return any(tensor.numel() != 1 for tensor in others) and not takes_whole_for_replicas()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
