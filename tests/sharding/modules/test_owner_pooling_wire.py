"""What owner-pooled tables put on the wire: three collectives, and distinct remote bags."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusedrec_torchrec.core.collective_counter import CollectiveCounter
from tests.case import Case, Table, batch, sharded
from tests.cluster import Cluster
from tests.parity import train_step
from tests.sharding.modules.test_owner_pooling import MIX, SUMS
from tests.sharding.modules.test_wire import collectives_per_step, fused_capacity

Clusters = Callable[[int], Cluster]
BAGS = (
    Table("a", 50, dim=8, pooling="mean", sharding="fused_table_wise"),
    Table("b", 33, dim=16, features=("x", "y"), sharding="fused_column_wise"),
    Table("c", 60, dim=4, features=("y",), sharding="fused_table_wise"),
    Table("d", 20, dim=16, sharding="fused_column_wise"),
)


@pytest.mark.parametrize("kind", ["ebc", "weighted", "no ids", "one id", "vbe"])
@pytest.mark.parametrize("tables", ["mix", "bags"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_three_collectives_per_step_for_any_mix(
    clusters: Clusters, world_size: int, tables: str, kind: str
) -> None:
    of_rows_too = SUMS if kind == "weighted" else MIX
    only_bags = tuple(t for t in of_rows_too if t.sharding != "fused_row_wise")
    case = Case(
        tables=of_rows_too if tables == "mix" else only_bags,
        batch_sizes=(16,) * world_size,
        weighted=kind == "weighted",
        vbe=kind == "vbe",
        lengths={"no ids": (0,), "one id": (1,)}.get(kind, (3,)),
        repeated=True,
    )
    for steps in clusters(world_size).run(collectives_per_step, case):
        first, *rest = ([c.name for c in step] for step in steps)
        # Without ids even a header of no capacity is enough.
        assert first == ["all_to_all"] * (3 if kind == "no ids" else 4)
        if kind == "vbe":  # a batch that is larger than those before takes a round more
            rest = [step for step in rest if len(step) != 4]
            assert rest
        assert rest == [["all_to_all"] * 3] * len(rest)


def test_four_collectives_in_exact_counts_mode(cluster_2: Cluster) -> None:
    case = Case(tables=MIX, batch_sizes=(16, 16), lengths=(3,), input_dist="exact_counts")
    for steps in cluster_2.run(collectives_per_step, case):
        assert [[c.name for c in step] for step in steps] == [["all_to_all"] * 4] * len(steps)


def owners_of(index: int, table: Table, ranks: int) -> list[int]:
    """Returns the owners of a table's shards, as ``tests.case`` places them."""
    shards = 1
    if table.sharding == "fused_column_wise":
        shards = max(n for n in (1, 2, 4) if n <= ranks and table.dim % (4 * n) == 0)
    return [(index + c) % ranks for c in range(shards)]


def asked_of(case: Case, step: int, rank: int) -> dict[int, tuple[int, int]]:
    """What a rank asks of others by owner: elements of rows and pooled rows, and words of ids."""
    features, ranks = batch(case, step, rank), dist.get_world_size()
    asked = dict.fromkeys(range(ranks), (0, 0))
    for i, table in enumerate(case.tables):
        if table.sharding == "fused_row_wise":  # TorchRec's blocks of rows
            ids = torch.cat([features[name].values() for name in table.feature_names]).unique()
            for owner in (ids // -(-table.rows // ranks)).tolist():
                elements, words = asked[owner]
                asked[owner] = elements + table.dim, words + 1
            continue
        bags = set()
        for name in table.feature_names:
            jagged = features[name]
            ends = jagged.lengths().cumsum(0).tolist()
            for length, end in zip(jagged.lengths().tolist(), ends, strict=True):
                own = slice(end - length, end)
                weights = jagged.weights()[own].tolist() if case.weighted else ()
                bags.add((tuple(jagged.values()[own].tolist()), tuple(weights)))
        bags.discard(((), ()))
        owners = owners_of(i, table, ranks)
        words = sum(1 + len(ids) * (2 if case.weighted else 1) for ids, _ in bags)
        for owner in owners:
            elements, so_far = asked[owner]
            asked[owner] = elements + len(bags) * table.dim // len(owners), so_far + words
    return asked


def bytes_of_steps(case: Case) -> list[dict[str, Any]]:
    model, rank, ranks = sharded(case), dist.get_rank(), dist.get_world_size()
    found = []
    for step in range(case.steps):
        capacity = fused_capacity(model)
        with CollectiveCounter() as counter:
            train_step(case, model, step)
        mine = asked_of(case, step, rank)
        others = [asked_of(case, step, r)[rank][0] for r in range(ranks) if r != rank]
        found.append(
            {
                "bytes": [c.bytes_sent for c in counter.collectives],
                "asks": sum(elements for owner, (elements, _) in mine.items() if owner != rank),
                "words": sum(words for owner, (_, words) in mine.items() if owner != rank),
                "largest": max(words for _, words in mine.values()),
                "is_asked": sum(others),
                "capacity": capacity,
            }
        )
    return found


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("repeated", [False, True])
def test_rows_on_the_wire_are_the_distinct_remote_bags(
    clusters: Clusters, world_size: int, weighted: bool, repeated: bool
) -> None:
    case = Case(
        tables=tuple(Table(t.name, t.rows, t.dim, t.features, sharding=t.sharding) for t in BAGS),
        batch_sizes=(16,) * world_size,
        weighted=weighted,
        # Bags that do not repeat often enough are not looked for: all repeat, or none does.
        lengths=(0, 2, 3) if repeated else (12,),
        skew=2.0 if repeated else 0.0,
        repeated=repeated,
    )
    dims = {t.dim // len(owners_of(i, t, world_size)) for i, t in enumerate(case.tables)}
    header = 3 + 2 * len(dims)  # units and ids of each bucket
    for rank in clusters(world_size).run(bytes_of_steps, case):
        for step in rank[1:]:
            ids, rows, gradients = step["bytes"]
            assert step["largest"] <= step["capacity"]
            assert ids == (world_size - 1) * 4 * (header + step["capacity"])
            assert rows == 4 * step["is_asked"]  # sent by owners
            assert gradients == 4 * step["asks"]  # sent by requesters


def test_bags_that_repeat_travel_once_in_batches_that_only_a_sample_is_taken_of(
    cluster_2: Cluster,
) -> None:
    """Up to 128 bags of a slot are all looked at; of more, a sample tells whether to look on."""
    case = Case(
        tables=tuple(Table(t.name, t.rows, t.dim, t.features, sharding=t.sharding) for t in BAGS),
        batch_sizes=(700, 700),
        lengths=(1, 2),
        skew=3.0,
        steps=2,
    )
    for rank in cluster_2.run(bytes_of_steps, case):
        for step in rank:
            *_, rows, gradients = step["bytes"]
            assert rows == 4 * step["is_asked"]
            assert gradients == 4 * step["asks"]
            # Without dedup there would be a row of 44 columns, or half of it, for each sample.
            assert step["asks"] < 700 * 44 / 4


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_on_the_wire_of_a_mix_are_distinct_rows_and_distinct_bags(
    clusters: Clusters, world_size: int, weighted: bool
) -> None:
    case = Case(
        tables=SUMS,
        batch_sizes=(16,) * world_size,
        weighted=weighted,
        lengths=(0, 2, 3),
        skew=2.0,
        repeated=True,
    )
    of_bags = {
        t.dim // len(owners_of(i, t, world_size))
        for i, t in enumerate(case.tables)
        if t.sharding != "fused_row_wise"
    }
    of_rows = {t.dim for t in case.tables if t.sharding == "fused_row_wise"}
    header = 3 + len(of_rows) + 2 * len(of_bags)
    for rank in clusters(world_size).run(bytes_of_steps, case):
        for step in rank[1:]:
            ids, *second_round, rows, gradients = step["bytes"]
            assert ids == (world_size - 1) * 4 * (header + step["capacity"])
            if second_round:  # some rank's batch was larger than those before
                assert second_round == [4 * step["words"]]
            assert rows == 4 * step["is_asked"]
            assert gradients == 4 * step["asks"]


@pytest.mark.parametrize("weighted", [False, True])
def test_exact_counts_send_a_word_per_bag_and_one_per_id_and_weight(
    cluster_2: Cluster, weighted: bool
) -> None:
    case = Case(
        tables=tuple(Table(t.name, t.rows, t.dim, t.features, sharding=t.sharding) for t in BAGS),
        batch_sizes=(16, 16),
        weighted=weighted,
        lengths=(0, 2, 3),
        repeated=True,
        input_dist="exact_counts",
    )
    for rank in cluster_2.run(bytes_of_steps, case):
        for step in rank:
            assert step["bytes"][0] == 4 * (3 + 2 * 2)
            assert step["bytes"][1] == 4 * step["words"]
