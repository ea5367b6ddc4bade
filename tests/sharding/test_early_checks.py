"""Tables whose rows may change by themselves are refused before training starts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

import fusedrec_torchrec as fr
from fusedrec_torchrec.sharding.early_checks import check_early
from tests.case import Case, Table, sharded
from tests.cluster import Cluster

CPU = torch.device("cpu")
TABLES = (Table("a", 50, dim=8), Table("b", 33, dim=16))


def refused(case: Case) -> str:
    """Returns why a model cannot be trained; no batch has been read then."""
    model = sharded(case)
    with pytest.raises(ValueError, match="early") as error:
        fr.FusedTrainPipeline(model, model.fused_optimizer, CPU)
    return str(error.value)


def test_weight_decay_is_refused(cluster_2: Cluster) -> None:
    case = Case(TABLES, (6, 4), settings=(("weight_decay", 0.1),))
    texts = cluster_2.run(refused, case)
    assert texts[0] == texts[1]
    assert texts[0].startswith("tables ['a'] have weight_decay, must be without for rows to arrive")


@pytest.mark.parametrize("sync", ["weights", "gradients"])
def test_groups_of_ranks_are_refused(cluster_2: Cluster, sync: Any) -> None:
    case = Case(TABLES, (6, 4), grid=fr.GridOptions(sharding_group_size=1, sync=sync))
    texts = cluster_2.run(refused, case)
    assert texts[0] == texts[1]
    assert texts[0].startswith("rows cannot arrive early with 2D parallelism: a sync of the groups")


def test_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match="tables are on cuda, must be on cpu for rows to arrive"):
        check_early([], [], torch.device("cuda", 1), in_groups=False)


def test_optimizers_with_a_state_of_the_table_are_refused() -> None:
    """There are none on CPU."""
    config = SimpleNamespace(embedding_tables=[SimpleNamespace(name="a")])
    table = SimpleNamespace(optimizer_type=EmbOptimType.ADAM, decays_weights=False)
    bucket: Any = SimpleNamespace(config=config)
    kernel: Any = SimpleNamespace(table=table)
    with pytest.raises(ValueError, match=r"tables \['a'\] have the optimizer ADAM, must be one of"):
        check_early([bucket], [kernel], CPU, in_groups=False)
