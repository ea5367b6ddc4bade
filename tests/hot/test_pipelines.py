"""TorchRec's pipelines with hot rows: bit for bit the plain loop without them.

A pipeline's input dist of the next batch comes before this batch's update.
"""

import dataclasses

import pytest
import torch

import fusedrec_torchrec as fr
from tests.case import Case
from tests.cluster import Cluster
from tests.hot.replicas import without_hot_rows
from tests.sharding.modules.test_pipelines import case_of, pipelined, plain_loop

HOT = {"a": (0, 1, 2, 30), "b": (0, 1, 32)}
OPTIONS = {
    "fixed": fr.HotOptions(),
    "hot batches": fr.HotOptions(hot_batches=True),
    "adapting": fr.HotOptions(
        adapt=fr.AdaptOptions(every=3, sample=1, counters=64, margin=1.0), hot_batches=True
    ),
}


def compare(case: Case, name: str) -> None:
    want_outputs, want_states = plain_loop(without_hot_rows(case))
    got_outputs, got_states = pipelined(case, name)
    for got, want in zip(got_outputs, want_outputs, strict=True):
        assert torch.equal(got, want)
    for got, want in zip(got_states, want_states, strict=True):
        assert torch.equal(got, want)


ALL = [
    (name, kind, options)
    for name in ("TrainPipelineSparseDist", "TrainPipelineSparseDistLite")
    for kind in ("ebc", "ec", "fp_ebc")
    for options in OPTIONS
]
FIRST = [("TrainPipelineSparseDist", kind, "adapting") for kind in ("ebc", "ec", "fp_ebc")]


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [pytest.param(*each, marks=() if each in FIRST else pytest.mark.slow) for each in ALL],
)
def test_pipeline_equals_plain_loop_without_hot_rows(
    cluster_2: Cluster, name: str, kind: str, options: str
) -> None:
    case = case_of(kind)
    tables = tuple(dataclasses.replace(t, hot=HOT.get(t.name)) for t in case.tables)
    cluster_2.run(
        compare, dataclasses.replace(case, tables=tables, hot_options=OPTIONS[options]), name
    )
