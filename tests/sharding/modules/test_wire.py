"""What goes over the wire: how many collectives, and how many bytes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusedrec_torchrec.core.collective_counter import Collective, CollectiveCounter
from tests.case import Case, Table, batch, sharded
from tests.cluster import Cluster
from tests.parity import train_step

MANY = tuple(
    Table(
        f"t{i}",
        40 + i,
        dim=(8, 16, 4)[i % 3],
        pooling="mean" if i % 2 else "sum",
        features=(f"x{i}", f"y{i}"),
    )
    for i in range(12)
)
ONE = (Table("a", 100, dim=8),)


def collectives_per_step(case: Case) -> list[list[Collective]]:
    model = sharded(case)
    counts = []
    for step in range(case.steps):
        with CollectiveCounter() as counter:
            train_step(case, model, step)
        counts.append(counter.collectives)
    return counts


def remote_unique_rows(case: Case, step: int, rank: int) -> tuple[int, list[int], int]:
    """Of a rank: rows asked of others, elements by owner, and the largest message's ids."""
    world_size = dist.get_world_size()
    features = batch(case, step, rank)
    rows, elements, messages = 0, [0] * world_size, [0] * world_size
    for table in case.tables:
        ids = torch.cat([features[f].values() for f in table.feature_names]).unique()
        owners = ids // -(-table.rows // world_size)
        for owner in range(world_size):
            count = int((owners == owner).sum())
            messages[owner] += count
            if owner != rank:
                rows += count
                elements[owner] += count * table.dim
    return rows, elements, max(messages)


def fused_capacity(model: Any) -> int:
    sparse = model.module.sparse
    return sparse._input_dists[sparse.fused.index].exchange.capacity.current


def bytes_of_steady_steps(case: Case) -> list[dict[str, Any]]:
    model = sharded(case)
    world_size = dist.get_world_size()
    found = []
    for step in range(case.steps):
        capacity = fused_capacity(model)
        with CollectiveCounter() as counter:
            train_step(case, model, step)
        rank = dist.get_rank()
        rows, elements, largest = remote_unique_rows(case, step, rank)
        of_others = [remote_unique_rows(case, step, r)[1][rank] for r in range(world_size)]
        found.append(
            {
                "collectives": [c.name for c in counter.collectives],
                "dtypes": [c.dtype for c in counter.collectives],
                "bytes": [c.bytes_sent for c in counter.collectives],
                "asks": sum(elements),
                "is_asked": sum(of_others),
                "asked_rows": rows,
                "capacity": capacity,
                "largest": largest,
            }
        )
    return found


@pytest.mark.parametrize("tables", [ONE, MANY], ids=["one table", "12 tables, 3 dims, 2 poolings"])
@pytest.mark.parametrize("kind", ["ebc", "weighted", "ec", "vbe"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_three_collectives_per_step(
    clusters: Any, tables: tuple[Table, ...], kind: str, world_size: int
) -> None:
    if kind == "ec":
        tables = tuple(Table(t.name, t.rows, 8, t.features) for t in tables)
    # The same number of ids in every step, so that the capacity has settled after the first.
    case = Case(
        tables=tables,
        batch_sizes=(16,) * world_size,
        weighted=kind == "weighted",
        lengths=(3,),
        skew=0.0,
        kind="ec" if kind == "ec" else "ebc",
        vbe=kind == "vbe",
    )
    for steps in clusters(world_size).run(collectives_per_step, case):
        first, *rest = ([c.name for c in step] for step in steps)
        assert first == ["all_to_all"] * 4  # no capacity known yet: headers, then exact ids
        assert rest == [["all_to_all"] * 3] * len(rest)


def test_four_collectives_in_exact_counts_mode(cluster_2: Cluster) -> None:
    case = Case(tables=MANY, batch_sizes=(16, 16), lengths=(3,), input_dist="exact_counts")
    for steps in cluster_2.run(collectives_per_step, case):
        assert [[c.name for c in step] for step in steps] == [["all_to_all"] * 4] * len(steps)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("output_dtype", ["fp32", "fp16"])
def test_rows_on_the_wire_are_the_unique_remote_rows(
    clusters: Any, world_size: int, output_dtype: str
) -> None:
    case = Case(
        tables=MANY, batch_sizes=(16,) * world_size, lengths=(3,), output_dtype=output_dtype
    )
    size = {"fp32": 4, "fp16": 2}[output_dtype]
    header = 3 + 3  # status, wanted capacity, overflow, and a count for each of the three buckets
    by_rank = clusters(world_size).run(bytes_of_steady_steps, case)
    for rank in by_rank:
        for step in rank[1:]:
            ids, rows, gradients = step["bytes"]
            assert step["dtypes"][0] == torch.int32
            assert step["largest"] <= step["capacity"]
            assert ids == (world_size - 1) * 4 * (header + step["capacity"])
            assert rows == step["is_asked"] * size  # sent by owners
            assert gradients == step["asks"] * size  # sent by requesters


def test_exact_counts_send_four_bytes_per_unique_remote_id(cluster_2: Cluster) -> None:
    case = Case(tables=MANY, batch_sizes=(16, 16), lengths=(3,), input_dist="exact_counts")
    for rank in cluster_2.run(bytes_of_steady_steps, case):
        for step in rank:
            assert step["bytes"][0] == 4 * (3 + 3)
            assert step["bytes"][1] == 4 * step["asked_rows"]


def test_padding_is_bounded_by_the_slack(cluster_2: Cluster) -> None:
    case = Case(
        tables=(Table("a", 100_000, dim=8),), batch_sizes=(2000, 2000), lengths=(4,), skew=0.0
    )
    for rank in cluster_2.run(bytes_of_steady_steps, case):
        for step in rank[1:]:
            assert step["largest"] <= step["capacity"] <= 1.125 * 1.1 * step["largest"] + 64
