"""Writes of ranks into what lies in shards are told apart, and said to differ where that is all in which ranks do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_autoparallel.mesh import ParallelMesh
from lightning_autoparallel.pipeline import own_writes, sketches
from lightning_autoparallel.pipeline.own_writes import OwnWrites, differing_writes


@pytest.fixture
def cut(fake_mesh: Callable[..., ParallelMesh]) -> Callable[[Placement], DTensor]:
    fake_mesh(dp_shard=2)
    mesh = init_device_mesh("cpu", (2,))
    return lambda placement: DTensor.from_local(torch.zeros(2, 3), mesh, [placement], run_check=False)


PLACE = "cut 0: a tensor of shape [4, 3]"


def text(target: DTensor, *writes: Sequence[Tensor | float]) -> str:
    own = OwnWrites()
    for values in writes:
        own.note(lambda: "parameter w", target, values)
    return own.text()


VALUES = {
    "floats": (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0])),
    "of one sum": (torch.tensor([1.0, 2.0]), torch.tensor([0.0, 3.0])),
    "integers": (torch.tensor([1, 2]), torch.tensor([1, 3])),
    "truths": (torch.tensor([True, False]), torch.tensor([False, False])),
    "complex": (torch.tensor([1j, 2.0]), torch.tensor([1j, 3.0])),
    "conjugated": (torch.tensor([1j, 2.0]).conj(), torch.tensor([1j, 2.0])),
    "16 bits": (torch.ones(3).bfloat16(), torch.zeros(3).bfloat16()),
    "numbers": (0.5, 0.25),
    "none and some": (torch.zeros(0), torch.ones(1)),
}


@pytest.mark.parametrize("kind", VALUES)
def test_other_values_are_told_apart(kind: str, cut: Callable[[Placement], DTensor]):
    one, other = ("the end" + text(cut(Shard(0)), [value]) for value in VALUES[kind])
    again = "the end" + text(cut(Shard(0)), [VALUES[kind][0]])
    assert differing_writes([one, again]) == []
    assert one == again
    assert differing_writes([one, other, again]) == [PLACE]
    assert differing_writes([one, "the end"]) == [PLACE]


def test_another_number_of_writes_and_another_order_are_differences(cut: Callable[[Placement], DTensor]):
    once, twice = text(cut(Shard(0)), [1.0]), text(cut(Shard(0)), [1.0], [1.0])
    assert differing_writes([once, twice]) == ["cut 1: a tensor of shape [4, 3]"]
    there, back = text(cut(Shard(0)), [1.0], [2.0]), text(cut(Shard(0)), [2.0], [1.0])
    assert differing_writes([there, back]) == [PLACE, "cut 1: a tensor of shape [4, 3]"]


def test_where_a_rank_has_stopped_writes_say_nothing():
    assert differing_writes([]) is None


def test_a_write_into_a_copy_moves_no_others(cut: Callable[[Placement], DTensor]):
    own = OwnWrites()
    own.note(lambda: "copy", cut(Replicate()), [1.0])
    own.note(lambda: "parameter w", cut(Shard(0)), [1.0])
    assert own.text(parts=True) == text(cut(Shard(0)), [1.0])


def test_ranks_elsewhere_differ_otherwise(cut: Callable[[Placement], DTensor]):
    one, other = (text(cut(Shard(0)), [float(value)]) for value in range(2))
    assert differing_writes([f"the end{one}", f"parameter v{other}"]) is None
    assert differing_writes([f"the end{one}", None]) is None


def test_who_reports_names_what_any_rank_knows_once(cut: Callable[[Placement], DTensor]):
    own, told = OwnWrites(), []
    other = "cut 2: a tensor of shape [5]"
    for _ in range(2):
        for value in (1.0, 2.0):
            own.note(lambda: "parameter w", cut(Shard(0)), [value])
        differing = [PLACE, "cut 1: a tensor of shape [4, 3]", other]
        own.tell(differing, "fit", told.append, lambda mine: [mine, {other: "parameter v"}])
        own.clear()
    assert len(told) == 1
    assert "different values into parameter w, parameter v, in fit" in told[0]
    many = {f"cut {i}: a tensor of shape [1]": f"parameter {i}" for i in range(10, 18)}
    own.tell(list(many), "fit", told.append, lambda mine: [many])
    assert "parameter 14 and 3 more, in fit" in told[1]


def test_what_one_thing_is_rounded_to_is_no_difference(cut: Callable[[Placement], DTensor]):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    values -= values.mean()  # sums are small
    one, other, third = (text(cut(Shard(0)), [v]) for v in (values, values * (1 + 1e-7), values * (1 + 1e-3)))
    assert one != other
    assert differing_writes([one, other]) == []
    assert differing_writes([one, third]) == [PLACE]


def test_objects_are_told_by_their_kind(cut: Callable[[Placement], DTensor]):
    generators = torch.Generator(), torch.Generator()
    one, other = (text(cut(Shard(0)), [0.5, generator, slice(1), 1j]) for generator in generators)
    assert one == other


@pytest.mark.parametrize("value", [torch.eye(3).to_sparse(), torch.zeros(3, device="meta")], ids=["sparse", "meta"])
def test_values_that_are_not_there_are_told_by_their_shape(value: Tensor, cut: Callable[[Placement], DTensor]):
    assert str(list(value.shape)) in text(cut(Shard(0)), [value])


def test_large_values_are_added_up_piece_by_piece(monkeypatch: pytest.MonkeyPatch):
    values = torch.arange(100.0).reshape(10, 10).t() - 50
    whole = sketches.sketch(values)
    assert whole[0] == values.sum() and whole[-1] == values.abs().sum()
    monkeypatch.setattr(sketches, "_PIECE", 42)  # of which each of the strides is a divisor
    assert torch.equal(sketches.sketch(values), whole)


def test_of_very_many_there_is_only_a_number(cut: Callable[[Placement], DTensor], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(own_writes, "_MOST", 2)
    same, more = text(cut(Shard(0)), [1.0], [1.0], [1.0]), text(cut(Shard(0)), [1.0], [1.0], [2.0], [1.0])
    assert same.count("tensor of shape") == more.count("tensor of shape") == 2
    assert differing_writes([same, more]) == ["as many in all"]


def test_copies_count_where_a_step_takes_them_for_equal(cut: Callable[[Placement], DTensor]):
    own = OwnWrites()
    own.note(lambda: "parameter w", cut(Replicate()), [1.0])
    assert own.text(parts=True) == ""
    assert own.text() != ""


def test_shards_are_not_compared(cut: Callable[[Placement], DTensor]):
    assert text(cut(Shard(0)), [cut(Shard(0))]) == text(cut(Shard(0)), [cut(Shard(1))])


def test_what_was_written_before_is_forgotten(cut: Callable[[Placement], DTensor]):
    own = OwnWrites()
    own.note(lambda: "parameter w", cut(Shard(0)), [1.0])
    own.clear()
    assert own.text() == ""
