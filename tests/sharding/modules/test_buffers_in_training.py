"""Memory that is used again never shows: parity with buffers of all sizes, filled with rubbish."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusedrec_torchrec.core import buffers, native
from tests.case import Case, Table
from tests.cluster import Cluster
from tests.parity import run_and_check

TABLES = (Table("a", 50, dim=8), Table("b", 33, dim=16), Table("c", 9, dim=8))


def run_with_rubbish(case: Case, **kwargs: Any) -> None:
    """Small batches take buffers, too, and every buffer comes full of not-a-numbers."""
    take = buffers.Buffers.take

    def taken(self: buffers.Buffers, *args: Any) -> torch.Tensor:
        return take(self, *args).fill_(float("nan"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "SMALLEST", 1)
        patch.setattr(buffers.Buffers, "take", taken)
        run_and_check(case, **kwargs)


@pytest.mark.parametrize("kind", ["ebc", "fp_ebc", "ec"])
@pytest.mark.parametrize("lengths", [(0, 1, 2, 4), (1,)], ids=["jagged", "one id each"])
def test_all_kinds_of_modules(cluster_2: Cluster, kind: str, lengths: tuple[int, ...]) -> None:
    tables = TABLES if kind != "ec" else tuple(Table(n, r) for n, r in (("a", 50), ("b", 9)))
    case = Case(
        tables=tables,
        batch_sizes=(6, 4),
        kind=kind,
        optimizer="rowwise_adagrad",
        lengths=lengths,
    )
    cluster_2.run(run_with_rubbish, case)


def test_variable_batch_per_feature(cluster_2: Cluster) -> None:
    cluster_2.run(run_with_rubbish, Case(tables=TABLES, batch_sizes=(5, 6), vbe=True))


def run_with_native_on_one_rank(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(native, "available", lambda: False)
        run_and_check(case)


def test_ranks_with_and_without_the_operators_train_together(cluster_2: Cluster) -> None:
    """A host without a compiler among others must not change anybody's gradients."""
    cluster_2.run(run_with_native_on_one_rank, Case(tables=TABLES, batch_sizes=(6, 4)))


def test_three_ranks_divide_gradients_by_three(clusters: Callable[[int], Cluster]) -> None:
    """No power of two: the division stays where it was."""
    case = Case(tables=TABLES, batch_sizes=(6, 4, 5), integers=False)
    clusters(3).run(run_and_check, case)
