"""Shards of a fused table's columns that TorchRec's search has put on the same rank."""

from torchrec.distributed.planner.types import Topology
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)

from fusedrec_torchrec.planner.columns_apart import move_columns_apart
from fusedrec_torchrec.sharding.plan_entries import remote_devices
from fusedrec_torchrec.sharding.sharding_type import FUSED_COLUMN_WISE, FUSED_TABLE_WISE

RANKS = 4


def entry(sharding_type: str, rows: int, ranks: list[int]) -> ParameterSharding:
    """Describes a table whose shards have 8 columns each, on the given ranks."""
    devices = remote_devices("cpu", RANKS, RANKS)
    shards = [ShardMetadata([0, 8 * i], [rows, 8], devices[rank]) for i, rank in enumerate(ranks)]
    return ParameterSharding(sharding_type, "fused", list(ranks), EnumerableShardingSpec(shards))


def moved(**entries: ParameterSharding) -> dict[str, list[int]]:
    """Returns the ranks of all tables' shards after the move."""
    plan = ShardingPlan({"bags": EmbeddingModuleShardingPlan(entries)})
    move_columns_apart(plan, Topology(RANKS, "cpu", local_world_size=RANKS))
    for name, of_table in entries.items():
        assert isinstance(of_table.sharding_spec, EnumerableShardingSpec)
        placed = [shard.placement.rank() for shard in of_table.sharding_spec.shards]
        assert placed == of_table.ranks, name
    return {name: list(of_table.ranks or []) for name, of_table in entries.items()}


def test_a_second_shard_goes_to_the_rank_with_the_fewest_weights() -> None:
    others = {
        "on_0": entry(FUSED_TABLE_WISE, 10, [0]),
        "on_2": entry(FUSED_TABLE_WISE, 5000, [2]),
        "on_3": entry(FUSED_TABLE_WISE, 20, [3]),
    }
    ranks = moved(**others, columns=entry(FUSED_COLUMN_WISE, 100, [1, 1]))
    assert ranks["columns"] == [1, 0]
    assert moved(**others, columns=entry(FUSED_COLUMN_WISE, 100, [0, 0]))["columns"] == [0, 1]


def test_what_was_moved_counts_for_what_is_moved_next() -> None:
    ranks = moved(
        first=entry(FUSED_COLUMN_WISE, 100, [0, 0]),
        second=entry(FUSED_COLUMN_WISE, 100, [0, 0]),
        third=entry(FUSED_COLUMN_WISE, 100, [0, 0]),
    )
    assert sorted(of_table[1] for of_table in ranks.values()) == [1, 2, 3]


def test_the_rank_that_was_relieved_has_room_for_others() -> None:
    """Rank 0 had most of all; without the second shard it has less than rank 3."""
    ranks = moved(
        first=entry(FUSED_COLUMN_WISE, 100, [0, 0]),
        on_1=entry(FUSED_TABLE_WISE, 10, [1]),
        on_2=entry(FUSED_TABLE_WISE, 300, [2]),
        on_3=entry(FUSED_TABLE_WISE, 150, [3]),
        second=entry(FUSED_COLUMN_WISE, 5, [1, 1]),
    )
    assert ranks["first"] == [0, 1], "rank 1 had the fewest"
    assert ranks["second"] == [1, 0], "rank 0 has 100 rows left, rank 3 has 150"


def test_ranks_that_have_columns_already_are_left_out() -> None:
    ranks = moved(columns=entry(FUSED_COLUMN_WISE, 100, [2, 2, 0, 1]))
    assert ranks["columns"] == [2, 3, 0, 1]


def test_what_is_apart_stays() -> None:
    ranks = moved(columns=entry(FUSED_COLUMN_WISE, 100, [3, 1]), whole=entry("table_wise", 9, [1]))
    assert ranks == {"columns": [3, 1], "whole": [1]}
