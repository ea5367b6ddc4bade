"""Plan files: what is written is what is read, and a plan for something else is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    placement,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import (
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import fusedrec_torchrec as fr
from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.hot.options import HotRule
from fusedrec_torchrec.sharding.plan_conversion import plan_file_of, sharding_plan_of
from fusedrec_torchrec.sharding.plan_diff import differences
from fusedrec_torchrec.sharding.plan_entries import (
    FusedParameterSharding,
    GridShardingPlan,
    fused_column_wise,
    fused_row_wise,
    fused_table_wise,
)
from fusedrec_torchrec.sharding.plan_file import PlanFile, _numbers, _runs, read_plan, write_plan

RANKS = 4
ROWS = {"a": 10, "b": 3, "c": 500}
BF16 = fr.Codecs(forward=fr.CodecOptions(type="bf16"))
WAYS: dict[str, Any] = {
    "fused": lambda: fused_row_wise(),
    "fused, uneven": lambda: fused_row_wise([0, 7, 0, 3]),
    "fused, exact counts, host": lambda: fused_row_wise(
        compute_kernel="fused_uvm_caching", input_dist="exact_counts"
    ),
    "fused, hot": lambda: fused_row_wise(hot_rows=[1, 5, 7]),
    "fused tables": lambda: fr.fused_table_wise(2, input_dist="exact_counts"),
    "fused columns": lambda: fr.fused_column_wise([3, 1], codecs=BF16),
    "fused columns on all": lambda: fr.fused_column_wise([0, 1, 2, 3]),
    "fused columns on one": lambda: fr.fused_column_wise([1]),
    "table_wise": lambda: table_wise(rank=2, compute_kernel="fused"),
    "row_wise": lambda: row_wise(compute_kernel="fused"),
    "column_wise": lambda: column_wise(ranks=[0, 1, 2, 3], compute_kernel="fused"),
    "columns on some": lambda: column_wise(ranks=[3, 1], compute_kernel="fused"),
    "fused, whole": lambda: fused_table_wise(rank=2, input_dist="exact_counts"),
    "fused, columns": lambda: fused_column_wise(ranks=[3, 0], input_dist="exact_counts"),
    "fused, columns on all": lambda: fused_column_wise(ranks=[0, 1, 2, 3]),
    "data_parallel": lambda: data_parallel(),
    "table_row_wise": lambda: table_row_wise(host_index=1),
    "blocks": lambda: blocks,
}


def blocks(*_: Any) -> ParameterSharding:
    """Rows and columns divided, as in TorchRec's grid shardings."""
    places = [([row, column], [5, 8]) for column in (0, 8) for row in (0, 5)]
    return ParameterSharding(
        sharding_type="grid_shard",
        compute_kernel="fused",
        ranks=[0, 1, 2, 3],
        sharding_spec=EnumerableShardingSpec(
            [
                ShardMetadata(offset, size, placement(DEVICE[0], rank, 2))
                for rank, (offset, size) in enumerate(places)
            ]
        ),
    )


DEVICE = ["cpu"]


class Model(nn.Module):
    def __init__(self, rows: dict[str, int] = ROWS) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=16, feature_names=[n])
            for n, r in rows.items()
        ]
        self.bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


def plan_with(way: Any, model: Model, device: str = "cpu") -> ShardingPlan:
    module = construct_module_sharding_plan(
        model.bags,
        {"a": way, "b": fused_row_wise(input_dist="exact_counts"), "c": row_wise()},
        sharder=fr.FusedEmbeddingBagCollectionSharder(),
        local_size=2,
        world_size=RANKS,
        device_type=device,
    )
    return ShardingPlan({"bags": module})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_written_is_what_is_read(tmp_path: Path, way: str, device: str) -> None:
    model = Model()
    DEVICE[0] = device
    plan = plan_with(WAYS[way](), model, device)
    file, hot_set = plan_file_of(plan, RANKS, 2, device)
    for table in plan.plan["bags"].values():
        if isinstance(table, FusedParameterSharding):
            table.input_dist = "exact_counts"  # one for all, which the file has once
    write_plan(tmp_path / "plan.yaml", file, hot_set)
    read, hot = read_plan(tmp_path / "plan.yaml")
    assert sharding_plan_of(read, hot, model, fr.fused_sharders()) == plan
    assert (hot is not None) == (way == "fused, hot")
    if hot is None:
        assert read == file
    # Again, not a byte differs.
    before = (tmp_path / "plan.yaml").read_text()
    write_plan(tmp_path / "plan.yaml", read, hot)
    assert (tmp_path / "plan.yaml").read_text() == before


def test_a_plan_for_groups(tmp_path: Path) -> None:
    model = Model()
    plan = GridShardingPlan(plan_with(table_wise(rank=1), model).plan, RANKS)
    grid = {"sharding_group_size": RANKS, "sync_every": 3, "layout": "groups_adjacent"}
    file, _ = plan_file_of(plan, 12, 2, "cpu", {"grid": grid})
    write_plan(tmp_path / "plan.yaml", file)
    read, _ = read_plan(tmp_path / "plan.yaml")
    assert read.grid == fr.GridOptions(**grid)  # type: ignore[arg-type]
    found = sharding_plan_of(read, None, model, fr.fused_sharders())
    assert isinstance(found, GridShardingPlan) and found.sharding_group_size == RANKS


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=40))
def test_runs_of_numbers(numbers: list[int]) -> None:
    assert _numbers(_runs(numbers), "x") == numbers


def written(folder: Path, text: str) -> Path:
    path = folder / "plan.yaml"
    path.write_text(text)
    return path


GOOD = """\
version: 1
ranks: 2
tables:
  a: {rows: 10, columns: 16, sharding: fused_row_wise, rows_per_rank: 5 x 2}
  b: {rows: 3, columns: 16, sharding: table_wise, ranks: [1], rows_per_rank: 3}
  c: {rows: 500, columns: 16, sharding: column_wise, columns_per_rank: 8 x 2}
"""


def test_a_file_written_by_hand(tmp_path: Path) -> None:
    file, _ = read_plan(written(tmp_path, GOOD))
    plan = sharding_plan_of(file, None, Model(), fr.fused_sharders()).plan["bags"]
    b, c = plan["b"], plan["c"]
    assert b.ranks == [1] and [s.shard_sizes for s in b.sharding_spec.shards] == [[3, 16]]
    assert [s.shard_offsets for s in c.sharding_spec.shards] == [[0, 0], [0, 8]]
    assert str(c.sharding_spec.shards[1].placement) == "rank:1/cpu"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("version: 1", "version: 7", "is a plan of version 7, must be 1"),
        ("version: 1\n", "", "is no plan file: version and tables are missing"),
        ("ranks: 2", "ranks: 0", "ranks is 0"),
        ("sharding: table_wise", "sharing: table_wise", "did you mean 'sharding'"),
    ],
)
def test_files_that_are_no_plans(tmp_path: Path, old: str, new: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_plan(written(tmp_path, GOOD.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("  a:", "  x:", "plans table 'x', which the model does not have; it has a, b, c"),
        ("  a: {", "  # a: {", "does not plan table 'a' of the model"),
        ("rows: 10,", "rows: 11,", "plans table 'a' with 11 x 16, the model's has 10 x 16"),
        ("5 x 2}", "5 x 3}", "tables.a.rows_per_rank adds up to 15, must to 10 rows"),
        ("5 x 2}", "five}", "rows_per_rank is 'five', must be numbers such as"),
        ("8 x 2}", "8}", "tables.c.columns_per_rank adds up to 8, must to 16"),
        ("table_wise, ranks: [1]", "fused_table_wise, ranks: [0, 1]", "must be one on each"),
        (
            "ing: column_wise, columns_per_rank: 8 x 2",
            "ing: fused_column_wise, columns_per_rank: '4, 12'",
            "tables.c is fused_column_wise, its shards must be equal columns",
        ),
        (
            "ing: column_wise, columns_per_rank: 8 x 2",
            "ing: fused_table_wise, columns_per_rank: 8 x 2",
            r"tables.c: ranks of a fused_table_wise table are \[0, 1\], must be one",
        ),
        ("ing: column_wise, ", "ing: fused_column_wise, ranks: [1, 1], ", "must be different ones"),
        (
            "table_wise, ranks: [1], ",
            "fused_table_wise, ranks: [1], hot_rule: {top_k: 2}, ",
            "tables.b is fused_table_wise with hot rows, must have none",
        ),
        ("ranks: [1]", "ranks: [2]", r"tables.b has 1 shards on ranks \[2\].* below 2"),
    ],
)
def test_plans_for_another_model(tmp_path: Path, old: str, new: str, problem: str) -> None:
    file, _ = read_plan(written(tmp_path, GOOD.replace(old, new)))
    with pytest.raises(ValueError, match=problem):
        sharding_plan_of(file, None, Model(), fr.fused_sharders())


def test_a_plan_for_another_cluster(tmp_path: Path) -> None:
    file, _ = read_plan(written(tmp_path, GOOD))
    with pytest.raises(ValueError, match="is a plan for 2 ranks, here are 8: plan again"):
        file.check_ranks(8, "plan.yaml")
    with pytest.raises(ValueError, match="is a plan for cpu, here is cuda"):
        file.check_device("cuda", "plan.yaml")


def test_codecs_of_a_plan(tmp_path: Path) -> None:
    file, _ = read_plan(written(tmp_path, GOOD))
    assert file.exchange_options(fr.ExchangeOptions()).codecs is None
    lossy, _ = read_plan(written(tmp_path, GOOD + "codecs: [int8, bf16]\n"))
    codecs = lossy.exchange_options(fr.ExchangeOptions()).codecs
    assert codecs is not None
    assert (codecs.forward.type, codecs.backward.type) == ("int8", "bf16")
    given = fr.ExchangeOptions(codecs=fr.Codecs())
    assert lossy.exchange_options(given).codecs == given.codecs
    with pytest.raises(ValueError, match=r"codecs.forward.type is 'fp8'"):
        read_plan(written(tmp_path, GOOD + "codecs: [fp8, fp32]\n"))
    old, _ = read_plan(written(tmp_path, GOOD + "codecs: [fp32, fp32]\n"))
    assert old == file


def test_other_hot_rows_than_planned(tmp_path: Path) -> None:
    plan = plan_with(fused_row_wise(hot_rows=[1, 5, 7]), Model())
    file, hot_set = plan_file_of(plan, RANKS, 2, "cpu")
    path = tmp_path / "plan.yaml"
    write_plan(path, file, hot_set)
    HotSet(ROWS, {"a": np.array([1, 5, 8])}).save(tmp_path / "plan.hot.npz")
    with pytest.raises(ValueError, match=r"plan\.hot\.npz has other hot rows than"):
        read_plan(path)
    (tmp_path / "plan.hot.npz").unlink()
    with pytest.raises(ValueError, match=r"plan\.hot\.npz"):
        read_plan(path)


def test_differences(tmp_path: Path) -> None:
    first, _ = read_plan(written(tmp_path, GOOD))
    changed = GOOD.replace("5 x 2", "'4, 6'").replace(
        "ranks: 2", "ranks: 2\ninput_dist: exact_counts"
    )
    second, _ = read_plan(written(tmp_path, changed.replace("  c:", "  d:")))
    assert list(differences(first, first)) == []
    assert list(differences(first, second)) == [
        ("input_dist", "-", "exact_counts"),
        ("a.rows_per_rank", "5 x 2", "4, 6"),
        ("c", "planned", "-"),
        ("d", "-", "planned"),
    ]


def test_rules_for_hot_rows_stay_and_what_has_no_place_is_refused(tmp_path: Path) -> None:
    model = Model()
    plan = plan_with(fused_row_wise(hot_rows=HotRule(top_k=5)), model)
    write_plan(tmp_path / "plan.yaml", *plan_file_of(plan, RANKS, 2, "cpu"))
    read = sharding_plan_of(*read_plan(tmp_path / "plan.yaml"), model, fr.fused_sharders())
    assert read.plan["bags"]["a"].hot_rows == HotRule(top_k=5)
    plan.plan["bags"]["a"].enforce_hbm = True
    with pytest.raises(ValueError, match="sets enforce_hbm, True, which a plan file has no place"):
        plan_file_of(plan, RANKS, 2, "cpu")


def test_two_tables_of_one_name_are_refused() -> None:
    model = Model()
    plan = plan_with(table_wise(rank=0), model)
    plan.plan["again"] = plan.plan["bags"]
    with pytest.raises(ValueError, match="table 'a' of 'again' has the name of another table"):
        plan_file_of(plan, RANKS, 2, "cpu")
    assert isinstance(plan_file_of(plan_with(row_wise(), model), RANKS, 2, "cpu")[0], PlanFile)
