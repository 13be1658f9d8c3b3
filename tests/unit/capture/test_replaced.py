"""Functions that captured steps call in another form, beside torch's own kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_autoparallel.capture.replaced import REPLACED

TARGETS = ([[0, 1, 2], [2, 1, 0]], [[0, 1, -1], [2, -1, 0]], [[-1, 0, 1], [1, -1, -1]], [[1, 1, -1], [-1, -1, -1]])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("settings", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"size_average": False}])
def test_multilabel_margin_loss(target: list[list[int]], settings: dict[str, object]) -> None:
    scores = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    ours = REPLACED[F.multilabel_margin_loss](scores, torch.tensor(target), **settings)
    theirs = F.multilabel_margin_loss(scores, torch.tensor(target), **settings)
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(loss.sum(), scores)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients)


def test_of_one_row() -> None:
    scores, target = torch.tensor([0.1, -0.2, 0.3]), torch.tensor([1, -1, 0])
    ours = REPLACED[F.multilabel_margin_loss](scores, target)
    torch.testing.assert_close(ours, F.multilabel_margin_loss(scores, target))


def test_gradients_of_tables_are_dense() -> None:
    table, rows = torch.randn(5, 3, requires_grad=True), torch.tensor([1, 1, 4])
    REPLACED[F.embedding](rows, table, None, None, 2.0, False, True).sum().backward()
    REPLACED[F.embedding_bag](rows.view(1, 3), table, sparse=True, mode="sum").sum().backward()
    assert table.grad is not None and table.grad.layout == torch.strided
    assert table.grad[:, 0].tolist() == [0, 4, 0, 0, 2]
