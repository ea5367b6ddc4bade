"""Parity also holds where the C++ operators cannot be built."""

from typing import Any

import pytest

from fusedrec_torchrec.core import native
from tests.case import Case, Table
from tests.cluster import Cluster
from tests.parity import run_and_check

TABLES = (
    Table("a", 50, dim=8, pooling="mean"),
    Table("b", 33, dim=16, rows_per_rank=(30, 3)),
    Table("c", 7, dim=8, features=("f", "g")),
)


def run_without_native(case: Case, **kwargs: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "available", lambda: False)
        run_and_check(case, **kwargs)


@pytest.mark.parametrize("integers", [True, False], ids=["exact", "random"])
def test_bags(cluster_2: Cluster, integers: bool) -> None:
    case = Case(tables=TABLES, batch_sizes=(6, 4), optimizer="rowwise_adagrad", integers=integers)
    cluster_2.run(run_without_native, case)


def test_weights(cluster_2: Cluster) -> None:
    tables = (Table("a", 50, dim=8), Table("b", 33, dim=16))
    cluster_2.run(run_without_native, Case(tables=tables, batch_sizes=(6, 4), weighted=True))


def test_one_id_each(cluster_2: Cluster) -> None:
    cluster_2.run(run_without_native, Case(tables=TABLES, batch_sizes=(6, 4), lengths=(1,)))


def test_variable_batch_per_feature(cluster_2: Cluster) -> None:
    cluster_2.run(run_without_native, Case(tables=TABLES, batch_sizes=(5, 6), vbe=True))


@pytest.mark.parametrize("vbe", [False, True])
def test_sequences(cluster_2: Cluster, vbe: bool) -> None:
    tables = (Table("a", 50), Table("b", 33, rows_per_rank=(3, 30)), Table("c", 9))
    case = Case(tables=tables, batch_sizes=(6, 4), kind="ec", optimizer="adagrad", vbe=vbe)
    cluster_2.run(run_without_native, case)
