"""Tables that their owners pool: outputs, weights and state equal the unsharded module's."""

from collections.abc import Callable

import pytest

from tests.case import Case, Table
from tests.cluster import Cluster
from tests.parity import run_and_check

OWNER_POOLED = ("fused_table_wise", "fused_column_wise")
MIX = (
    Table("a", 50, dim=8, pooling="mean", sharding="fused_table_wise"),
    Table("b", 33, dim=16),
    Table("c", 7, dim=8, sharding="fused_column_wise"),
    Table("d", 130, dim=4, pooling="mean", sharding="fused_table_wise"),
    Table("e", 60, dim=8),
    Table("f", 40, dim=16, pooling="mean", sharding="fused_column_wise"),
)
WHOLE = tuple(
    Table(t.name, t.rows, t.dim, pooling=t.pooling, sharding="fused_table_wise") for t in MIX
)


@pytest.mark.parametrize(
    ("world_size", "integers"),
    [(1, True), (2, True), (4, True), (2, False), (3, False), (4, False)],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_a_mix_of_all_types_equals_unsharded_and_stock(
    clusters: Callable[[int], Cluster], world_size: int, optimizer: str, integers: bool
) -> None:
    case = Case(
        tables=MIX,
        batch_sizes=(6,) * world_size,
        optimizer=optimizer,
        integers=integers,
        repeated=True,
    )
    clusters(world_size).run(run_and_check, case, also_stock=world_size < 3)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_row_wise_adagrad_of_whole_tables(
    clusters: Callable[[int], Cluster], world_size: int
) -> None:
    case = Case(tables=WHOLE, batch_sizes=(6,) * world_size, optimizer="rowwise_adagrad")
    clusters(world_size).run(run_and_check, case, also_stock=True)
