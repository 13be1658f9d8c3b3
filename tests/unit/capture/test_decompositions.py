"""Operators taken apart compute what torch's own do, on real tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_autoparallel.capture.decompositions import planning_decompositions

aten = torch.ops.aten
TABLE = planning_decompositions()


def compare(op: Any, *args: Any, **kwargs: Any) -> None:
    """Ours against torch's, both on copies, and what both left in their arguments."""
    results, given = [], []
    for function in (TABLE[op], op):
        copied = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
        value = function(*copied, **kwargs)
        results.append(list(value) if isinstance(value, (tuple, list)) else [value])
        given.append([arg for arg in copied if isinstance(arg, Tensor)])
    for ours, theirs in zip(results[0], results[1], strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(*given, strict=True):
        torch.testing.assert_close(ours, theirs)


X = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(1))
DIMS = [([0],), ([-1, 0], True), ([1],), ([],)]


@pytest.mark.parametrize("args", DIMS, ids=str)
def test_mean(args):
    compare(aten.mean.dim, X, *args)
    compare(aten.mean.dim, X.half(), *args, dtype=torch.float32)
    compare(aten.mean.default, X)


@pytest.mark.parametrize("op", [aten.var_mean.correction, aten.var.correction, aten.std.correction], ids=str)
@pytest.mark.parametrize("dims", [None, [0], [1, -1]], ids=str)
@pytest.mark.parametrize("options", [{}, {"correction": 0}, {"correction": 2, "keepdim": True}], ids=str)
def test_variances(op, dims, options: dict):
    compare(op, X, dims, **options)


def test_variance_of_a_constant_far_from_zero():
    """One-pass formulas lose it all to rounding."""
    compare(aten.var.correction, torch.full((64,), 1e4) + torch.randn(64) * 1e-2)


def test_integers_have_no_mean_of_their_own():
    compare(aten.mean.dim, torch.arange(6), [0], dtype=torch.float64)


AFFINE = [(torch.randn(3), torch.randn(3)), (None, None)]
SHAPES = [(6, 3), (4, 3, 5), (2, 3, 4, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", AFFINE, ids=["affine", "plain"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_batch_norm_forward_and_running_statistics(shape, affine, training: bool):
    """``compare`` looks at the running statistics too: they are arguments changed in place."""
    running = torch.randn(3), torch.rand(3) + 0.5
    compare(aten._native_batch_norm_legit.default, torch.randn(shape), *affine, *running, training, 0.3, 1e-4)
    compare(
        aten._native_batch_norm_legit_functional.default, torch.randn(shape), *affine, *running, training, 0.3, 1e-4
    )


def test_batch_norm_without_running_statistics():
    compare(aten.native_batch_norm.default, torch.randn(4, 3, 5), *AFFINE[0], None, None, True, 0.1, 1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", AFFINE, ids=["affine", "plain"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("mask", [[True, True, True], [True, False, False]], ids=str)
def test_batch_norm_backward(shape, affine, training: bool, mask: list[bool]):
    if affine[0] is None:
        mask = [True, False, False]
    x, running = torch.randn(shape), (torch.randn(3), torch.rand(3) + 0.5)
    _, average, invstd = aten._native_batch_norm_legit.default(
        x, *affine, *(r.clone() for r in running), training, 0.1, 1e-5
    )
    args = (torch.randn(shape), x, affine[0], *running, average, invstd, training, 1e-5, mask)
    compare(aten.native_batch_norm_backward.default, *args)


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_dropout_keeps_its_share_and_scale(p: float):
    x = torch.ones(20_000)
    dropped, mask = TABLE[aten.native_dropout.default](x, p, True)
    assert mask.dtype is torch.bool
    assert mask.float().mean().item() == pytest.approx(1 - p, abs=0.02)
    torch.testing.assert_close(dropped, mask / (1 - p) if p < 1 else torch.zeros_like(x))
    ours = TABLE[aten.native_dropout_backward.default](x, mask, 4.0)
    assert torch.equal(ours, aten.native_dropout_backward.default(x, mask, 4.0))


def test_dropout_does_nothing_in_eval():
    compare(aten.native_dropout.default, X, 0.5, False)


@pytest.mark.parametrize("p", [0.2, 0.9])
def test_bernoulli_draws_with_its_probability(p: float):
    for op, args in (
        (aten.bernoulli.p, (torch.zeros(20_000), p)),
        (aten.bernoulli.default, (torch.full((20_000,), p),)),
    ):
        drawn = TABLE[op](*args)
        assert drawn.dtype is torch.float32 and set(drawn.unique().tolist()) == {0.0, 1.0}
        assert drawn.mean().item() == pytest.approx(p, abs=0.02)


FILLED = [
    (aten.zeros_like.default, (X,), {}),
    (aten.ones_like.default, (X,), {"dtype": torch.bool}),
    (aten.full_like.default, (X, 3.5), {}),
    (aten.new_zeros.default, (X, [2, 3]), {}),
    (aten.new_ones.default, (X, [2]), {"dtype": torch.int64}),
    (aten.new_full.default, (X, [2], 7.0), {}),
    (aten.zeros.default, ([2, 3],), {}),
    (aten.ones.default, ([2],), {"dtype": torch.float64}),
]


@pytest.mark.parametrize(("op", "args", "kwargs"), FILLED, ids=lambda value: str(value)[:30])
def test_filled_tensors(op, args, kwargs):
    compare(op, *args, **kwargs)


@pytest.mark.parametrize("op", [aten.rand_like.default, aten.randn_like.default], ids=str)
def test_random_like(op):
    drawn = TABLE[op](torch.zeros(20_000, dtype=torch.float64))
    expected = (0.5, 1 / 12) if op is aten.rand_like.default else (0.0, 1.0)
    assert drawn.dtype is torch.float64
    assert drawn.mean().item() == pytest.approx(expected[0], abs=0.03)
    assert drawn.var().item() == pytest.approx(expected[1], rel=0.05)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.normal.float_float, (3.0, 2.0, [20_000])),
        (aten.normal.Tensor_float, (torch.full((20_000,), 3.0), 2.0)),
        (aten.normal.float_Tensor, (3.0, torch.full((20_000,), 2.0))),
        (aten.randint_like.default, (torch.zeros(20_000, dtype=torch.int64), 7)),
        (aten.randint_like.low_dtype, (torch.zeros(20_000), 5, 12)),
        (getattr(aten.random, "from"), (torch.zeros(20_000), 5, 12)),
        (aten.random.to, (torch.zeros(20_000, dtype=torch.int32), 12)),
    ],
    ids=str,
)
def test_what_else_draws_is_made_of_factories(op, args):
    """As many of its shape, dtype, mean and variance as torch's own draw."""
    drawn, expected = TABLE[op](*args), op(*args)
    assert (drawn.shape, drawn.dtype) == (expected.shape, expected.dtype)
    assert drawn.double().mean().item() == pytest.approx(expected.double().mean().item(), abs=0.1)
    assert drawn.double().var().item() == pytest.approx(expected.double().var().item(), rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.int64, torch.bool], ids=str)
def test_random_numbers_of_all_sizes(dtype):
    drawn = [
        aten.random.default(torch.zeros(20_000, dtype=dtype)),
        TABLE[aten.random.default](torch.zeros(20_000, dtype=dtype)),
    ]
    means = [numbers.double().mean().item() for numbers in drawn]
    assert {numbers.dtype for numbers in drawn} == {dtype} and means[1] == pytest.approx(means[0], rel=0.05)


FLAGS = torch.tensor([[[1.0, 0.0], [torch.inf, -0.0]], [[0.0, 0.0], [2.0, -3.0]]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int64], ids=str)
@pytest.mark.parametrize("name", ["any", "all"])
def test_truth_values_along_dims(name, dtype):
    """As torch has it, whose sum over a list of no dims is over all of them, and whose truth is over none."""
    operator, flags = getattr(aten, name), FLAGS.clamp(0, 5).to(dtype) if dtype != torch.float32 else FLAGS
    compare(operator.default, flags)
    compare(operator.default, flags[0, 0, 0])
    compare(operator.default, flags[:0])
    compare(operator.dim, flags, -1, True)
    compare(operator.dim, flags, 0)
    for dims in ([0, 2], [-1], [], None):
        compare(operator.dims, flags, dims)
        compare(operator.dims, flags, dims, True)


def test_what_is_no_number_is_true():
    assert TABLE[aten.any.default](torch.tensor([0.0, torch.nan])) and TABLE[aten.all.default](
        torch.tensor([torch.nan])
    )


LOGITS, CLASSES = torch.randn(6, 4), torch.tensor([0, 3, -100, 1, -100, 2])
LOG_P, WEIGHT = LOGITS.log_softmax(1), torch.rand(4) + 0.5
A, B = torch.randn(4, 5), torch.rand(4, 5)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["plain", "weighted"])
def test_nll_loss(weight, reduction: int):
    compare(aten.nll_loss_forward.default, LOG_P, CLASSES, weight, reduction, -100)
    _, total = aten.nll_loss_forward.default(LOG_P, CLASSES, weight, reduction, -100)
    grad = torch.randn(6) if reduction == 0 else torch.tensor(2.0)
    compare(aten.nll_loss_backward.default, grad, LOG_P, CLASSES, weight, reduction, -100, total)
    image, places = torch.randn(2, 4, 3, 3), torch.randint(4, (2, 3, 3))
    compare(aten.nll_loss2d_forward.default, image, places, weight, reduction, 2)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize(
    ("op", "backward", "extra"),
    [
        (aten.mse_loss, aten.mse_loss_backward, ()),
        (aten.smooth_l1_loss, aten.smooth_l1_loss_backward, (0.7,)),
        (aten.huber_loss, aten.huber_loss_backward, (0.7,)),
        (aten.soft_margin_loss, aten.soft_margin_loss_backward, ()),
    ],
    ids=str,
)
def test_elementwise_losses(op, backward, extra, reduction: int):
    compare(op.default, A, B, reduction, *extra)
    grad = torch.randn(4, 5) if reduction == 0 else torch.tensor(2.0)
    compare(backward.default, grad, A, B, reduction, *extra)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weight", [None, torch.rand(4, 5)], ids=["plain", "weighted"])
def test_binary_cross_entropy(weight, reduction: int):
    compare(aten.binary_cross_entropy.default, B, A.sigmoid(), weight, reduction)
    grad = torch.randn(4, 5) if reduction == 0 else torch.tensor(2.0)
    compare(aten.binary_cross_entropy_backward.default, grad, B, A.sigmoid(), weight, reduction)


def test_group_norm():
    """Its operator takes the batch size as a number, so it must never reach the planner."""
    x, weight, bias = torch.randn(4, 6, 5), torch.randn(6), torch.randn(6)
    compare(aten.native_group_norm.default, x, weight, bias, 4, 6, 5, 2, 1e-5)
    _, average, invstd = aten.native_group_norm.default(x, weight, bias, 4, 6, 5, 2, 1e-5)
    args = (torch.randn(4, 6, 5), x, average, invstd, weight, 4, 6, 5, 2, [True, True, True])
    compare(aten.native_group_norm_backward.default, *args)


HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("op", [aten.native_batch_norm.default, aten._native_batch_norm_legit.default], ids=str)
def test_batch_norm_of_half_numbers(op, dtype):
    """Statistics and parameters in float32, the result in half, as in mixed precision."""
    x = (torch.randn(64, 3, 4) + 10).to(dtype)
    affine, running = (torch.rand(3), torch.rand(3)), (torch.zeros(3), torch.ones(3))
    ours, theirs = [], []
    for function, kept in ((TABLE[op], ours), (op, theirs)):
        statistics = [tensor.clone() for tensor in running]
        kept += [*function(x, *affine, *statistics, True, 0.5, 1e-5), *statistics]
    assert [tensor.dtype for tensor in ours] == [dtype, *[torch.float32] * 4]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if one.dtype == dtype else 1e-4, atol=1e-3)
    args = (torch.randn(64, 3, 4).to(dtype), x, affine[0], *running, *ours[1:3], True, 1e-5, [True] * 3)
    gradients = TABLE[aten.native_batch_norm_backward.default](*args)
    assert [tensor.dtype for tensor in gradients] == [dtype, torch.float32, torch.float32]
    whole = aten.native_batch_norm_backward.default(*(t.float() if isinstance(t, Tensor) else t for t in args))
    for one, other in zip(gradients, whole, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_group_norm_of_half_numbers(dtype):
    x, weight, bias = (torch.randn(4, 6, 5) + 10).to(dtype), torch.randn(6), torch.randn(6)
    ours = TABLE[aten.native_group_norm.default](x, weight, bias, 4, 6, 5, 2, 1e-5)
    theirs = aten.native_group_norm.default(x.float(), weight, bias, 4, 6, 5, 2, 1e-5)
    assert [tensor.dtype for tensor in ours] == [dtype, torch.float32, torch.float32]
    torch.testing.assert_close(ours[0].float(), theirs[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(list(ours[1:]), list(theirs[1:]), rtol=1e-4, atol=1e-5)
    grad = torch.randn(4, 6, 5).to(dtype)
    backward = aten.native_group_norm_backward.default
    gradients = TABLE[backward](grad, x, *ours[1:], weight, 4, 6, 5, 2, [True] * 3)
    assert [tensor.dtype for tensor in gradients] == [dtype, torch.float32, torch.float32]
    whole = backward(grad.float(), x.float(), *theirs[1:], weight, 4, 6, 5, 2, [True] * 3)
    for one, other in zip(gradients, whole, strict=True):
        torch.testing.assert_close(one.float(), other, rtol=1e-2, atol=1e-2)


def test_sums_of_half_numbers_do_not_overflow():
    ones = torch.ones(100_000).half()
    compare(aten.mean.default, ones)
    compare(aten.mean.dim, ones, [0])
    compare(aten.var_mean.correction, torch.randn(100_000).half() * 10, [0])


@pytest.mark.parametrize("source", [X[0], X[0, 0], torch.arange(15).view(3, 5)], ids=lambda source: str(source.shape))
def test_what_is_copied_over_all_of_a_tensor(source: Tensor):
    compare(aten.copy.default, X[0], source)


def test_a_tensor_that_is_made_for_that():
    empty = TABLE[aten.new_empty_strided.default](X, [2, 3], [3, 1], dtype=torch.float64)
    assert (empty.shape, empty.stride(), empty.dtype) == ((2, 3), (3, 1), torch.float64)
    assert TABLE[aten.new_empty_strided.default](X, [2, 3], [1, 2]) is NotImplemented


_FILLED = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    "target",
    [
        _FILLED.permute(2, 0, 1),
        _FILLED.transpose(0, 1),
        torch.zeros(1, 3, 1, 4).permute(3, 0, 1, 2),
        torch.zeros(4, 2, 1, 3).contiguous(memory_format=torch.channels_last),
        torch.zeros(0, 3).t(),
    ],
    ids=lambda target: str(target.stride()),
)
def test_what_is_copied_lies_as_its_target_does(target: Tensor):
    source = torch.arange(target.numel(), dtype=torch.float64).view(target.shape)
    copied = TABLE[aten.copy.default](target, source)
    assert torch.equal(copied, source.float())
    assert copied.dtype == target.dtype
    large = [dim for dim, size in enumerate(target.shape) if size != 1]
    assert [copied.stride(dim) for dim in large] == [target.stride(dim) for dim in large]


def test_targets_with_holes_are_copied_to_as_torch_does():
    for target in (_FILLED[:, ::2], _FILLED[..., 0], torch.zeros(3, 1).expand(3, 4)):
        assert TABLE[aten.copy.default](target, torch.ones(())) is NotImplemented
