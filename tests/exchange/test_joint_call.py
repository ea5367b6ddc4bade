"""Which physical tables one call can look up, and the order of what calls give."""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.modules.embedding_configs import DataType

from fusedrec_torchrec.compat.optimizers import OPTIMIZERS
from fusedrec_torchrec.exchange.buckets import PhysicalTable, group_into_buckets, physical_tables
from fusedrec_torchrec.exchange.joint_call import joint_groups, joint_tables
from fusedrec_torchrec.exchange.wire_order import in_wire_order
from tests.exchange.tables import sharded_tables


def tables_of(*specs: dict[str, Any], owner_pooled: tuple[str, ...] = ()) -> list[PhysicalTable]:
    """Returns physical tables of some tables, of which each of two ranks has ten rows."""
    named: list[dict[str, object]] = [{"name": f"t{i}", **spec} for i, spec in enumerate(specs)]
    frozen = [str(spec["name"]) for spec in named if spec.get("frozen")]
    shards = sharded_tables(named, [[0, 10, 20]] * len(named))
    return physical_tables(group_into_buckets(shards, frozen=frozen, owner_pooled=owner_pooled))


def test_tables_of_all_dimensions_are_in_one_call() -> None:
    assert joint_groups(tables_of({"dim": 8}, {"dim": 16}, {"dim": 8}, {"dim": 32}), 0) == [
        [0, 1, 2]
    ]


def test_one_bucket_is_no_joint_table() -> None:
    assert joint_groups(tables_of({"dim": 8}, {"dim": 8}), 0) == []


def test_rows_and_bags_of_one_physical_table_are_two_features() -> None:
    assert joint_groups(tables_of({}, {}, owner_pooled=("t1",)), 0) == [[0]]


def test_tables_are_not_made_on_cpu() -> None:
    tables = tables_of({"dim": 8}, {"dim": 16})
    assert joint_tables(tables, 0, torch.device("cpu"), ()) == []


ROWWISE = EmbOptimType.EXACT_ROWWISE_ADAGRAD


@pytest.mark.parametrize(
    "other",
    [
        {"optimizer": ROWWISE},
        {"lr": 0.2},
        {"data_type": DataType.FP16},
        {"kernel": EmbeddingComputeKernel.FUSED_UVM},
        {"kernel": EmbeddingComputeKernel.FUSED_UVM_CACHING},
        {"frozen": True},
    ],
    ids=str,
)
def test_other_kinds_of_tables_are_not_in_it(other: dict[str, Any]) -> None:
    tables = tables_of({"dim": 8}, {"dim": 16}, {"dim": 32, **other})
    assert joint_groups(tables, 0, ("t2",) if "frozen" in other else ()) == [[0, 1]]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_with_variable_batches(optimizer: EmbOptimType) -> None:
    """FBGEMM refuses them for all others, when it is called."""
    tables = tables_of(*({"dim": dim, "optimizer": optimizer} for dim in (8, 16)))
    can = optimizer in (EmbOptimType.EXACT_SGD, ROWWISE, EmbOptimType.ADAM)
    assert joint_groups(tables, 0) == ([[0, 1]] if can else [])


def test_settings_that_nobody_has_thought_of_keep_tables_apart() -> None:
    tables = tables_of({"dim": 8}, {"dim": 16})
    for table in tables:
        table.config.fused_params["uvm_non_rowwise_momentum"] = True
    assert joint_groups(tables, 0) == []


def test_rows_of_a_call_fit_the_type_of_their_numbers() -> None:
    tables = tables_of(*({"dim": dim} for dim in (4, 8, 16, 32, 64)))
    assert joint_groups(tables, 0, max_rows=50) == [[0, 1, 2, 3, 4]]
    assert joint_groups(tables, 0, max_rows=49) == [[0, 1, 2, 3]]
    assert joint_groups(tables, 1, max_rows=29) == [[0, 1], [2, 3]]
    assert joint_groups(tables, 0, max_rows=9) == []


def test_what_calls_give_is_brought_into_the_order_of_the_wire() -> None:
    counts, dims = [[1, 2, 0], [2, 0, 1]], [1, 2, 3]
    # Units of requester r and bucket k are r * 10 + k; one call for buckets 0 and 2.
    both = torch.tensor([0.0, 10, 10, 12, 12, 12])
    alone = torch.tensor([[1.0, 1], [1, 1]])
    want = [0, 1, 1, 1, 1, 10, 10, 12, 12, 12]
    assert in_wire_order([both, alone], [[0, 2], [1]], counts, dims).tolist() == want
    assert in_wire_order([alone, both], [[1], [0, 2]], counts, dims).tolist() == want


def test_what_one_call_gives_is_in_that_order() -> None:
    units = torch.arange(6.0).view(3, 2)
    flat = in_wire_order([units], [[0]], [[1], [2]], [2])
    assert flat.tolist() == [0, 1, 2, 3, 4, 5] and flat.data_ptr() == units.data_ptr()
