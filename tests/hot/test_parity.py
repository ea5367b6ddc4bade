"""Training with hot rows equals training without: outputs, weights, optimizer state."""

import dataclasses
from collections.abc import Callable

import pytest

from fusedrec_torchrec.compat import optimizers, row_update
from fusedrec_torchrec.core import native
from fusedrec_torchrec.core.collective_counter import CollectiveCounter
from fusedrec_torchrec.exchange import layout
from fusedrec_torchrec.exchange.options import InputDist
from tests.case import Case, Table, batch, sharded
from tests.cluster import Cluster
from tests.hot.replicas import train_and_compare, train_both
from tests.parity import run_and_check, train_step

OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad"]
# Low ids are the frequent ones.
MIXED_DIMS = (
    Table("a", 50, dim=8, pooling="mean", hot=(0, 1, 2, 25, 49)),
    Table("b", 33, dim=16, hot=(0, 17)),
    Table("c", 7, dim=8, hot=(0, 1, 2, 3, 4, 5, 6)),
    Table("d", 130, dim=4, pooling="mean"),
    Table("e", 40, dim=8),
)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("integers", [True, False], ids=["exact", "random"])
def test_training_equals_training_without_hot_rows(
    clusters: Callable[[int], Cluster], world_size: int, optimizer: str, integers: bool
) -> None:
    case = Case(
        tables=MIXED_DIMS, batch_sizes=(6,) * world_size, optimizer=optimizer, integers=integers
    )
    clusters(world_size).run(train_and_compare, case)


@pytest.mark.parametrize("input_dist", ["single_shot", "exact_counts"])
def test_uneven_batches(cluster_4: Cluster, input_dist: InputDist) -> None:
    case = Case(
        tables=MIXED_DIMS,
        batch_sizes=(3, 9, 0, 5),
        optimizer="rowwise_adagrad",
        input_dist=input_dist,
    )
    cluster_4.run(train_and_compare, case)


def test_one_id_per_bag(cluster_2: Cluster) -> None:
    case = Case(tables=MIXED_DIMS, batch_sizes=(5, 4), lengths=(1,), optimizer="adagrad")
    cluster_2.run(train_and_compare, case)


def test_weighted(cluster_2: Cluster) -> None:
    tables = tuple(dataclasses.replace(t, pooling="sum") for t in MIXED_DIMS)
    case = Case(tables=tables, batch_sizes=(5, 4), weighted=True, optimizer="rowwise_adagrad")
    cluster_2.run(train_and_compare, case)


def test_variable_batch_per_feature(cluster_2: Cluster) -> None:
    case = Case(tables=MIXED_DIMS, batch_sizes=(5, 4), vbe=True, optimizer="rowwise_adagrad")
    cluster_2.run(train_and_compare, case)


@pytest.mark.parametrize("vbe", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sequences(cluster_2: Cluster, optimizer: str, vbe: bool) -> None:
    tables = (Table("a", 50, hot=(0, 1, 2, 30)), Table("b", 33), Table("c", 7, hot=(0, 6)))
    case = Case(tables=tables, batch_sizes=(5, 4), kind="ec", optimizer=optimizer, vbe=vbe)
    cluster_2.run(train_and_compare, case)


def test_feature_processors(cluster_2: Cluster) -> None:
    tables = (Table("a", 50, hot=(0, 1, 2, 30)), Table("b", 33, hot=(5,)))
    cluster_2.run(run_and_check, Case(tables=tables, batch_sizes=(5, 4), kind="fp_ebc"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fp16_weights(cluster_2: Cluster, optimizer: str) -> None:
    tables = (
        Table("a", 50, dtype="fp16", hot=(0, 1, 2, 30)),
        Table("b", 20, hot=(0,)),
        Table("c", 9, dtype="fp16"),
    )
    cluster_2.run(train_and_compare, Case(tables=tables, batch_sizes=(5, 4), optimizer=optimizer))


def test_fp16_outputs(cluster_2: Cluster) -> None:
    case = Case(tables=MIXED_DIMS, batch_sizes=(5, 4), output_dtype="fp16")
    cluster_2.run(train_and_compare, case)


def test_beside_stock_tables(cluster_2: Cluster) -> None:
    tables = (
        Table("a", 50, hot=(0, 1, 2, 30)),
        Table("b", 33, sharding="table_wise"),
        Table("c", 20, sharding="row_wise"),
    )
    cluster_2.run(run_and_check, Case(tables=tables, batch_sizes=(5, 5), optimizer="adagrad"))


def test_all_rows_hot(cluster_2: Cluster) -> None:
    tables = tuple(Table(n, 7, dim=d, hot=tuple(range(7))) for n, d in (("a", 8), ("b", 16)))
    cluster_2.run(train_and_compare, Case(tables=tables, batch_sizes=(6, 6)))


@pytest.mark.parametrize(
    "settings",
    [
        (("weight_decay", 0.01),),
        (("gradient_clipping", True), ("max_gradient", 0.5)),
        (("eps", 0.0),),
        (("stochastic_rounding", False),),
    ],
    ids=lambda settings: settings[0][0],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_settings_of_the_optimizer(
    clusters: Callable[[int], Cluster], world_size: int, settings: tuple[tuple[str, object], ...]
) -> None:
    case = Case(
        tables=MIXED_DIMS,
        batch_sizes=(6,) * world_size,
        optimizer="rowwise_adagrad",
        settings=settings,
    )
    clusters(world_size).run(train_both, case)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_learning_rates_that_change(cluster_2: Cluster, optimizer: str) -> None:
    """The last sync is finished in the next step, but with the learning rate of its own."""
    case = Case(tables=MIXED_DIMS, batch_sizes=(6, 5), optimizer=optimizer)
    cluster_2.run(train_both, case, (0.5, 0.25, 0.125, 1.0, 0.5))


def run_without_native(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "available", lambda: False)
        train_and_compare(case)


def run_without_the_operator(case: Case) -> None:
    """FBGEMM's update through a lookup, as where the operator behind it is not known."""
    with pytest.MonkeyPatch.context() as patch:
        without = {
            kind: dataclasses.replace(optimizer, cpu_operator="no_such_operator")
            for kind, optimizer in optimizers.OPTIMIZERS.items()
        }
        patch.setattr(row_update, "OPTIMIZERS", without)
        train_and_compare(case)


@pytest.mark.parametrize("way", [run_without_native, run_without_the_operator])
@pytest.mark.parametrize(
    "optimizer",
    ["rowwise_adagrad", *(pytest.param(o, marks=pytest.mark.slow) for o in OPTIMIZERS[:2])],
)
def test_other_ways_to_do_it(
    cluster_2: Cluster, optimizer: str, way: Callable[[Case], None]
) -> None:
    cluster_2.run(way, Case(tables=MIXED_DIMS, batch_sizes=(6, 5), optimizer=optimizer))


def run_with_64_bit_keys(case: Case) -> None:
    limit, layout.INT32_MAX = layout.INT32_MAX, 10
    try:
        train_and_compare(case)
    finally:
        layout.INT32_MAX = limit


def test_64_bit_keys(cluster_2: Cluster) -> None:
    cluster_2.run(run_with_64_bit_keys, Case(tables=MIXED_DIMS, batch_sizes=(6, 5)))


def collectives_of_a_step(case: Case) -> list[tuple[str, int]]:
    model = sharded(case)
    train_step(case, model, 0)  # loads the replicas
    with CollectiveCounter() as counter:
        train_step(case, model, 1)
    return [(c.name, c.bytes_sent) for c in counter.collectives]


def test_few_touched_rows_are_sent_and_many_are_summed(cluster_4: Cluster) -> None:
    """Every rank uses all rows of c in every step, and one or two of the many of a."""
    few = Table("a", 5000, hot=tuple(range(5000)))
    many = Table("c", 7, hot=tuple(range(7)))
    case = Case(tables=(few,), batch_sizes=(2, 3, 2, 3), lengths=(1,), skew=0.0)
    for rank, found in enumerate(cluster_4.run(collectives_of_a_step, case)):
        rows = len(set(batch(case, 1, rank).values().tolist()))
        # Beside ids, rows and gradients: places and gradients to each of the other three.
        assert [name for name, _ in found] == ["all_to_all"] * 4
        assert found[-1] == ("all_to_all", 3 * rows * (1 + 8) * 4)
    case = Case(tables=(many,), batch_sizes=(60,) * 4, lengths=(4,), skew=0.0)
    for found in cluster_4.run(collectives_of_a_step, case):
        assert found[-1] == ("all_reduce", round(2 * 3 / 4 * 7 * (8 + 1) * 4))
        assert [name for name, _ in found[:-1]] == ["all_to_all"] * 3
