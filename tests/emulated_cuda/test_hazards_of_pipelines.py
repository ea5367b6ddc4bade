"""Fused tables in all pipelines: no race between streams, no memory given away too early."""

import dataclasses
from itertools import islice
from typing import Any

import pytest
import torch
from torchrec.distributed.train_pipeline import train_pipelines

import fusedrec_torchrec as fr
from tests.case import Case, Table, local_device
from tests.cluster import Cluster
from tests.emulated_cuda import is_emulated
from tests.sharding.modules.test_owner_pooling import SHARED_FEATURES, only
from tests.sharding.modules.test_pipelines import batches, build, on_device, pipelined, plain_loop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_emulated(), reason="needs the emulated GPU (make test-cuda)"),
]

TABLES = (Table("a", 500, dim=8, pooling="mean"), Table("b", 330, dim=16), Table("c", 70, dim=8))
SHARED = tuple(
    dataclasses.replace(t, pooling="sum") for t in only("fused_row_wise", SHARED_FEATURES)
)
PREFETCHING = "PrefetchTrainPipelineSparseDist"
NAMES = (
    "plain loop",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistLite",
    "TrainPipelineFusedSparseDist",
    "TrainPipelineSemiSync",
    PREFETCHING,
    "EvalPipelineSparseDist",
)
HOT = {
    "cold": None,
    "hot": fr.HotOptions(),
    "adapting": fr.HotOptions(
        adapt=fr.AdaptOptions(every=3, sample=1, counters=64, margin=1.0), hot_batches=True
    ),
}

# Of FBGEMM's own, with stock tables, too.  While the forward of a batch reads rows in the cache,
# the prefetch of the next one writes others: rows of a batch under way are locked, so that no other
# row takes their places, and a row that leaves is of no batch under way.  What is compared here are
# whole tensors.  Backward and prefetch do wait for each other.
#
# Of torch's DistributedDataParallel, around feature processors: when it is made, it compares and
# sends parameters in C++, and waits for that there, which nobody sees here.
MADE = "torchrec/distributed/model_parallel.py"
EXPLAINED = (
    ("writes fbgemm::lru_cache_populate", "reads fbgemm::split_embedding_codegen_forward"),
    (f"reads aten::_local_scalar_dense on stream default ({MADE}", "writes c10d::allgather_"),
    (f"reads aten::copy_ on stream default ({MADE}", "writes c10d::broadcast_"),
)


def case_of(name: str, hot: str, kind: str = "ebc") -> Case:
    tables = tuple(
        dataclasses.replace(
            t,
            dim=8 if kind == "ec" else t.dim,
            kernel="fused_uvm_caching" if name == PREFETCHING else "fused",
            hot=None if hot == "cold" else tuple(range(0, t.rows, 7)),
        )
        for t in TABLES
    )
    return Case(
        tables,
        batch_sizes=(6, 6),
        kind=kind,
        optimizer="rowwise_adagrad",
        integers=False,
        settings=(("prefetch_pipeline", True),) if name == PREFETCHING else (),
        device="cuda",
        hot_options=HOT[hot],
    )


def evaluated(case: Case) -> None:
    model = build(case).eval()
    pipeline: Any = train_pipelines.EvalPipelineSparseDist(
        model, model.fused_optimizer, local_device(case)
    )
    iterator = batches(case)
    while True:
        try:
            pipeline.progress(iterator)
        except StopIteration:
            return


def looked_at(case: Case, name: str) -> tuple[int, list[str]]:
    """Returns how many streams were used, and what was found."""
    from tests.emulated_cuda.hazards import hazards

    with hazards() as found:
        if name == "plain loop":
            plain_loop(case)
        elif name == "EvalPipelineSparseDist":
            evaluated(case)
        else:
            pipelined(case, name)
    reports = found.reports()
    return len(found.streams), [r for r in reports if not _is_explained(r)]


def _is_explained(report: str) -> bool:
    return any(all(part in report for part in parts) for parts in EXPLAINED)


@pytest.mark.parametrize("hot", HOT)
@pytest.mark.parametrize("name", NAMES)
def test_streams_wait_for_each_other(gpu_cluster: Cluster, name: str, hot: str) -> None:
    for streams, reports in gpu_cluster.run(looked_at, case_of(name, hot), name):
        assert streams > 1  # the default one, and that of collectives
        assert not reports, "\n".join(reports)


OTHERS: dict[str, dict[str, Any]] = {
    "sequences": {"kind": "ec", "tables": SHARED, "same_dim": True},
    "sequences, variable batches": {"kind": "ec", "tables": SHARED, "same_dim": True, "vbe": True},
    "learned position weights": {"kind": "fp_ebc", "tables": SHARED},
    "tables that owners pool": {"tables": SHARED_FEATURES},
    "variable batches": {"tables": SHARED_FEATURES, "vbe": True},
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", ["TrainPipelineSparseDist", "TrainPipelineSemiSync"])
def test_streams_wait_for_counts_and_copies_of_ids(
    gpu_cluster: Cluster, name: str, other: str
) -> None:
    """Where a batch is put into the order of slots, and where its counts come with the headers."""
    given = dict(OTHERS[other])
    if given.pop("same_dim", False):
        given["tables"] = tuple(dataclasses.replace(t, dim=8) for t in given["tables"])
    case = dataclasses.replace(case_of(name, "cold"), **given)
    for streams, reports in gpu_cluster.run(looked_at, case, name):
        assert streams > 1
        assert not reports, "\n".join(reports)


CODEC = fr.CodecOptions(type="dct")
EXCHANGES: dict[str, dict[str, Any]] = {
    "codecs of numbers": {
        "codecs": fr.Codecs(
            forward=fr.CodecOptions(type="int8"), backward=fr.CodecOptions(type="bf16")
        )
    },
    "thresholds": {"codecs": fr.Codecs(forward=CODEC)},
    "2D weights": {"grid": fr.GridOptions(sharding_group_size=1, sync="weights")},
    "2D weights, one step later": {
        "grid": fr.GridOptions(sharding_group_size=1, sync="weights", overlap="one_step")
    },
    "2D gradients": {"grid": fr.GridOptions(sharding_group_size=1, sync="gradients")},
    "2D gradients, thresholds": {
        "grid": fr.GridOptions(sharding_group_size=1, sync="gradients", codec=CODEC)
    },
}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("name", ["plain loop", "TrainPipelineSparseDist"])
def test_streams_wait_for_codecs_and_other_groups(
    gpu_cluster: Cluster, name: str, exchange: str
) -> None:
    case = dataclasses.replace(case_of(name, "cold"), **EXCHANGES[exchange])
    for streams, reports in gpu_cluster.run(looked_at, case, name):
        assert streams > 1
        assert not reports, "\n".join(reports)


def without_backward(case: Case) -> list[str]:
    from tests.emulated_cuda.hazards import hazards

    with hazards() as found:
        model = build(case)
        for item in on_device(case):
            model(item)
    return found.reports()


def test_outputs_of_2d_gradients_that_nobody_differentiates(gpu_cluster: Cluster) -> None:
    case = dataclasses.replace(case_of("", "cold"), **EXCHANGES["2D gradients"])
    for reports in gpu_cluster.run(without_backward, case):
        assert not reports, "\n".join(reports)


def sent_by_two_streams(case: Case) -> list[str]:
    """Sends a batch by the default stream, and another one by a stream that waits for neither."""
    from tests.emulated_cuda.hazards import hazards

    with hazards() as found:
        model: Any = build(case)
        sparse, (first, second) = model._dmp_wrapped_module.sparse, islice(on_device(case), 2)
        torch.cuda.synchronize()
        sent = [sparse.input_dist(sparse.create_context(), first.features)]
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            sent.append(sparse.input_dist(sparse.create_context(), second.features))
            second.record_stream(side)
        for awaitable in sent:
            awaitable.wait().wait()
    return found.reports()


KEPT: dict[str, dict[str, Any]] = {
    "features in another order": {},
    "features of two tables": {"tables": SHARED_FEATURES},
    "learned position weights": {"kind": "fp_ebc", "tables": SHARED},
    "sequences of two tables": {
        "kind": "ec",
        "tables": tuple(dataclasses.replace(t, dim=8) for t in SHARED),
    },
}


@pytest.mark.parametrize("kept", KEPT)
def test_streams_wait_for_what_is_kept_for_later_batches(gpu_cluster: Cluster, kept: str) -> None:
    """What one stream has made when it sent a batch, and another one uses for the next."""
    case = dataclasses.replace(case_of("", "cold"), **KEPT[kept])
    for reports in gpu_cluster.run(sent_by_two_streams, case):
        reports = [report for report in reports if not _is_explained(report)]
        assert not reports, "\n".join(reports)
