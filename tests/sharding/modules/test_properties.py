"""Any tables, any batches: outputs, weights and optimizer state equal the unsharded module's."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.case import Case, Table
from tests.cluster import Cluster
from tests.parity import run_and_check
from tests.sharding.modules.test_without_native import run_without_native


@st.composite
def mixes(draw: st.DrawFn, world_size: int) -> Case:
    """All fused types beside each other and beside stock ones, with bags that repeat."""
    case = draw(cases(world_size, kinds=("ebc",)))
    stock = draw(st.booleans())
    kinds = ["fused_row_wise", "fused_table_wise", "fused_column_wise"]
    kinds += ["table_wise", "column_wise", "row_wise"] * stock
    tables = []
    for table in case.tables:
        # Where a rank has no rows of it, TorchRec's row_wise gets weights of other tables wrong.
        empty = -(-table.rows // world_size) * (world_size - 1) >= table.rows and world_size > 1
        kind = draw(st.sampled_from(kinds[:-1] if stock and empty else kinds))
        # TorchRec's row-wise means are inexact.
        pooling = "sum" if kind == "row_wise" else table.pooling
        tables.append(replace(table, sharding=kind, rows_per_rank=None, pooling=pooling))
    by_columns = any(t.sharding.endswith("column_wise") and t.dim > 4 for t in tables)
    optimizer = case.optimizer
    if optimizer == "rowwise_adagrad" and by_columns and world_size > 1:
        optimizer = "adagrad"  # column shards have numbers of their own
    return replace(
        case,
        tables=tuple(tables),
        # Stock tables want equal batches.
        batch_sizes=(case.batch_sizes[0],) * world_size if stock else case.batch_sizes,
        optimizer=optimizer,
        repeated=draw(st.booleans()),
        vbe=not stock and draw(st.booleans()),
        length_dtype=draw(st.sampled_from(["int32", "int64"])),
    )


@st.composite
def cases(draw: st.DrawFn, world_size: int, kinds: tuple[str, ...] = ("ebc", "ebc", "ec")) -> Case:
    kind = draw(st.sampled_from(kinds))
    weighted = kind == "ebc" and draw(st.booleans())
    features = [f"x{i}" for i in range(4)]
    tables = []
    for i in range(draw(st.integers(1, 5))):
        rows = draw(st.integers(1, 60))
        cuts = sorted(draw(st.integers(0, rows)) for _ in range(world_size - 1))
        bounds = [0, *cuts, rows]
        tables.append(
            Table(
                name=f"t{i}",
                rows=rows,
                dim=8 if kind == "ec" else draw(st.sampled_from([4, 8, 16])),
                features=tuple(
                    draw(st.lists(st.sampled_from(features), min_size=1, max_size=3, unique=True))
                ),
                pooling="sum" if weighted else draw(st.sampled_from(["sum", "mean"])),
                rows_per_rank=draw(
                    st.sampled_from([None, tuple(b - a for a, b in pairwise(bounds))])
                ),
            )
        )
    return Case(
        tables=tuple(tables),
        batch_sizes=tuple(draw(st.integers(0, 7)) for _ in range(world_size)),
        kind=kind,
        weighted=weighted,
        optimizer=draw(st.sampled_from(["sgd", "adagrad", "rowwise_adagrad"])),
        # Exact sums stay exact only if the division by the number of ranks is.
        integers=world_size != 3 and draw(st.booleans()),
        lengths=draw(st.sampled_from([(0,), (1,), (0, 1), (0, 1, 2, 4), (8,)])),
        skew=draw(st.sampled_from([0.0, 2.0, 8.0])),
        id_dtype=draw(st.sampled_from(["int32", "int64"])),
        input_dist=draw(st.sampled_from(["single_shot", "exact_counts"])),
        seed=draw(st.integers(0, 1000)),
    )


@given(case=cases(2))
@settings(max_examples=60)
def test_two_ranks(cluster_2: Cluster, case: Case) -> None:
    cluster_2.run(run_and_check, case)


@given(case=cases(4))
@settings(max_examples=20)
def test_four_ranks(cluster_4: Cluster, case: Case) -> None:
    cluster_4.run(run_and_check, case)


@given(case=mixes(2))
@settings(max_examples=30)
def test_mixes_of_all_types_on_two_ranks(cluster_2: Cluster, case: Case) -> None:
    cluster_2.run(run_and_check, case)


@given(case=mixes(4))
@settings(max_examples=10)
def test_mixes_of_all_types_on_four_ranks(cluster_4: Cluster, case: Case) -> None:
    cluster_4.run(run_and_check, case)


@given(case=mixes(2))
@settings(max_examples=20)
def test_mixes_of_all_types_without_native_operators(cluster_2: Cluster, case: Case) -> None:
    cluster_2.run(run_without_native, case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@given(data=st.data())
@settings(max_examples=500)
def test_many_more_mixes(
    clusters: Callable[[int], Cluster], world_size: int, data: st.DataObject
) -> None:
    clusters(world_size).run(run_and_check, data.draw(mixes(world_size)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@given(data=st.data())
@settings(max_examples=500)
def test_many_more(
    clusters: Callable[[int], Cluster], world_size: int, data: st.DataObject
) -> None:
    clusters(world_size).run(run_and_check, data.draw(cases(world_size)))
