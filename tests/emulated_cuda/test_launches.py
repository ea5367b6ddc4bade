"""Where our kernels are launched."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedrec_torchrec as fr
from tests.case import Case, Table
from tests.cluster import Cluster
from tests.emulated_cuda import counted, is_emulated
from tests.parity import run_and_check
from tests.sharding.modules.test_owner_pooling import MIX

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_emulated(), reason="needs the emulated GPU (make test-cuda)"),
]

TABLES = (Table("a", 500, dim=8, pooling="mean"), Table("b", 330, dim=16), Table("c", 70, dim=8))
CASES: dict[str, dict[str, Any]] = {
    "rows": {},
    "weights": {"weighted": True, "tables": tuple(Table(t.name, t.rows, t.dim) for t in TABLES)},
    "owners that pool": {"tables": MIX},
    "sequences": {"tables": tuple(dataclasses.replace(t, dim=8) for t in TABLES), "kind": "ec"},
    "hot rows": {
        "tables": tuple(dataclasses.replace(t, hot=tuple(range(0, t.rows, 7))) for t in TABLES),
        "hot_options": fr.HotOptions(),
    },
}


def ours(counts: Any) -> list[tuple[str, int]]:
    """The kernels of Triton that were launched, and the devices: names of C++ are mangled."""
    launched = ((event.detail, event.device) for event in counts.of("kernel"))
    return [(name, where) for name, where in launched if name[0] == "_" and name[:2] != "_Z"]


def train_where_another_device_is_current(case: Case) -> list[tuple[str, int]]:
    torch.cuda.set_device(0)
    try:
        with counted() as counts:
            run_and_check(case)
    finally:
        torch.cuda.set_device(dist.get_rank())
    return ours(counts)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_launched_where_their_tensors_are(gpu_cluster: Cluster, name: str) -> None:
    """Also on ranks that have not called ``torch.cuda.set_device``."""
    case = Case(**{"tables": TABLES, "batch_sizes": (7, 5), "device": "cuda", **CASES[name]})
    launches = gpu_cluster.run(train_where_another_device_is_current, case)
    for rank, launched in enumerate(launches):
        assert len({kernel for kernel, _ in launched}) > 5
        assert {device for _, device in launched} == {rank}
