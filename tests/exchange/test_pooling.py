"""Pooling and its gradients, against the sums written out."""

import pytest
import torch

from fusedrec_torchrec.exchange.bags import Bags
from fusedrec_torchrec.exchange.pooling import pool

IDS = torch.tensor([0, 3, 3, 1, 4, 0, 2], dtype=torch.int32)
OFFSETS = torch.tensor([0, 4, 4, 6, 7], dtype=torch.int32)
BAG_OF_ID = torch.tensor([0, 0, 0, 0, 2, 2, 3])
DIVISOR = torch.tensor([[4.0], [1.0], [2.0], [1.0]])


def small_integers(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 5, shape, generator=generator).float()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_outputs_and_gradients_of_rows_and_weights(weighted: bool, mean: bool) -> None:
    rows = small_integers(5, 4, seed=0).requires_grad_()
    weights = small_integers(7, seed=1).requires_grad_() if weighted else None
    out = pool(rows, weights, Bags(IDS, OFFSETS, DIVISOR if mean else None))

    same_rows = rows.detach().clone().requires_grad_()
    same_weights = weights.detach().clone().requires_grad_() if weights is not None else None
    terms = same_rows[IDS.long()]
    if same_weights is not None:
        terms = terms * same_weights[:, None]
    want = torch.zeros(4, 4).index_add(0, BAG_OF_ID, terms)
    if mean:
        want = want / DIVISOR
    gradient = small_integers(4, 4, seed=2) * 4
    out.backward(gradient)
    want.backward(gradient)
    assert out.equal(want)
    assert rows.grad is not None and rows.grad.equal(same_rows.grad)  # type: ignore[arg-type]
    if weights is not None and same_weights is not None:
        assert weights.grad is not None and weights.grad.equal(same_weights.grad)  # type: ignore[arg-type]


def test_rows_that_no_id_asks_for_get_no_gradient() -> None:
    rows = torch.ones(3, 4, requires_grad=True)
    pool(rows, None, Bags(torch.tensor([2, 2], dtype=torch.int32))).sum().backward()
    assert rows.grad is not None
    assert rows.grad[:, 0].tolist() == [0, 0, 2]
