"""TorchRec's model trackers are refused where they cannot work, and work where they can."""

import pytest
import torch.distributed as dist
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.model_tracker.types import TrackingMode

from tests.case import Case, Table, batch, sharded
from tests.cluster import Cluster

TABLES = (Table("a", 50), Table("b", 9, sharding="row_wise"), Table("c", 30))


def tracked(case: Case, mode: str, skipped: list[str]) -> str | int:
    """How many rows were looked up, or the error."""
    model = sharded(case)
    try:
        # What init_torchrec_delta_tracker does; itself it wants a model with dense parameters.
        tracker = ModelDeltaTrackerTrec(model, mode=TrackingMode[mode], fqns_to_skip=skipped)
    except ValueError as error:
        return str(error)
    model(batch(case, 0, dist.get_rank()))
    return sum(ids.numel() for ids in tracker.get_unique_ids().values())


@pytest.mark.parametrize("kind", ["ebc", "ec"])
@pytest.mark.parametrize("mode", ["ID_ONLY", "ROWWISE_ADAGRAD"])
def test_a_tracker_of_fused_tables_is_refused(cluster_2: Cluster, kind: str, mode: str) -> None:
    case = Case(tables=TABLES, batch_sizes=(6, 4), kind=kind, optimizer="rowwise_adagrad")
    for text in cluster_2.run(tracked, case, mode, []):
        assert str(text).startswith("tables a, c are fused, which TorchRec's model track")


def test_modules_with_fused_tables_can_be_skipped(cluster_2: Cluster) -> None:
    case = Case(tables=TABLES, batch_sizes=(6, 4))
    assert cluster_2.run(tracked, case, "ID_ONLY", ["sparse"]) == [0, 0]


def test_modules_without_fused_tables_are_tracked(cluster_2: Cluster) -> None:
    case = Case(tables=TABLES, batch_sizes=(6, 4)).only("row_wise")
    assert all(int(rows) > 0 for rows in cluster_2.run(tracked, case, "ID_ONLY", []))
