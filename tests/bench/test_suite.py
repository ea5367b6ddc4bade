"""Suites: sweeps, and what is refused."""

from pathlib import Path

import pytest

from fusedrec_torchrec.bench.suite import (
    CODEC_SYSTEMS,
    DEDUP_PER_TABLE,
    HOT_SYSTEMS,
    MLPERF_SIZES,
    PLANNED_SYSTEMS,
    STOCK_DEDUP,
    SYSTEMS,
    SuiteConfig,
    WorkloadConfig,
    headline_of,
)
from fusedrec_torchrec.core.config import from_mapping, load_yaml, to_mapping

SUITES = sorted(Path(__file__).parents[2].glob("benchmarks/*.yaml"))


def test_a_sweep_runs_all_combinations_under_names_of_their_own() -> None:
    suite = SuiteConfig(
        systems=["table_wise", "fused_row_wise"],
        workloads=[
            WorkloadConfig(name="a", sweep={"batch_size": [1, 2], "dims": [[4], [8, 16]]}),
            WorkloadConfig(name="b", systems=["row_wise"], sweep={"link": ["", "1gbit"]}),
        ],
    )
    expanded = suite.expanded()
    assert [(w.name, w.batch_size, w.dims) for w in expanded[:4]] == [
        ("a, batch_size 1, dims 4", 1, [4]),
        ("a, batch_size 1, dims 8+16", 1, [8, 16]),
        ("a, batch_size 2, dims 4", 2, [4]),
        ("a, batch_size 2, dims 8+16", 2, [8, 16]),
    ]
    assert [(w.name, w.link) for w in expanded[4:]] == [("b, loopback", ""), ("b, 1gbit", "1gbit")]
    assert expanded[0].systems == ["table_wise", "fused_row_wise"]
    assert expanded[4].systems == ["row_wise"]
    assert expanded[1].series == "a"
    # A rank is sent its workload as it is, and must not expand it again.
    assert from_mapping(WorkloadConfig, to_mapping(expanded[1])).expanded() == [expanded[1]]


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ({"sweep": {"batchsize": [1]}}, "batchsize is unknown; did you mean 'batch_size'"),
        ({"sweep": {"batch_size": [0]}}, "batch_size is 0"),
        ({"dims": [6]}, "dims holds 6, must be positive multiples of 4"),
        ({"systems": ["fused"]}, "systems.0 is 'fused'"),
        ({"multi_hot": "mlperf"}, "multi_hot is mlperf, must be empty unless data is criteo"),
        ({"data": "criteo", "multi_hot": [3, 0]}, "multi_hot holds 0, must be positive"),
        ({"bags": "stale"}, "bags is 'stale'"),
    ],
)
def test_mistakes_are_named(workload: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        from_mapping(SuiteConfig, {"workloads": [workload]}).expanded()


def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="pairs is 4"):
        from_mapping(SuiteConfig, {"pairs": 4})


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_ready_suites_are_valid(path: Path) -> None:
    workloads = from_mapping(SuiteConfig, load_yaml(path)).expanded()
    names = [w.name for w in workloads]
    assert len(set(names)) == len(names)
    assert all("fused_row_wise" in w.systems for w in workloads)


def test_there_are_ready_suites() -> None:
    assert {"quick", "targets", "links", "workloads", "growth", "crossover", "hot"} <= {
        p.stem for p in SUITES
    }
    default = {system for w in SuiteConfig().expanded() for system in w.systems}
    assert set(SYSTEMS) == default | {
        *(*HOT_SYSTEMS, *CODEC_SYSTEMS, *PLANNED_SYSTEMS, *STOCK_DEDUP, DEDUP_PER_TABLE)
    }


def suite(name: str) -> SuiteConfig:
    (path,) = (path for path in SUITES if path.stem == name)
    return from_mapping(SuiteConfig, load_yaml(path))


def test_the_suite_of_mlperf_has_its_sizes_on_both_links_with_both_allocators() -> None:
    found = suite("mlperf")
    assert found.allocators == ["default", "keep"]
    workloads = found.expanded()
    assert {(w.batch_size, *w.dims, w.link) for w in workloads} == {
        *((batch, dim, "") for batch in (512, 1024, 2048, 8192) for dim in (64, 128)),
        *((batch, dim, "1gbit") for batch in (1024, 8192) for dim in (64, 128)),
    }
    assert all(w.pooling_of(26) == list(MLPERF_SIZES) for w in workloads)
    assert all({"planner", "fused_planner", "fused_table_wise"} < {*w.systems} for w in workloads)


def test_the_crossover_goes_from_one_id_to_a_hundred_and_from_flat_to_steep() -> None:
    found = suite("crossover")
    assert found.allocators == ["default", "keep"]
    workloads = found.expanded()
    for kind in ("fresh", "repeated"):
        own = [w for w in workloads if w.bags == kind]
        assert {w.zipf for w in own} == {0.6, 1.05, 1.3}
        assert {w.pooling for w in own} >= {10, 100}
    assert {w.pooling for w in workloads} == {1, 2, 5, 10, 20, 50, 100}
    assert all(headline_of(w.systems) == "fused_planner" for w in workloads)


def test_the_headline_is_our_planner_where_it_was_measured() -> None:
    assert headline_of(["fused_planner", "fused_row_wise", "table_wise"]) == "fused_planner"
    assert headline_of(["fused_table_wise", "fused_row_wise"]) == "fused_row_wise"
    assert headline_of(["table_wise", "fused_table_wise"]) is None


def test_allocators_are_different_ones() -> None:
    with pytest.raises(ValueError, match=r"allocators are .*, must be different"):
        SuiteConfig(allocators=["keep", "keep"])
    with pytest.raises(ValueError, match="allocators"):
        from_mapping(SuiteConfig, {"allocators": []})


def test_sizes_of_bags_are_used_in_turn() -> None:
    workload = WorkloadConfig(data="criteo", multi_hot=[3, 1])
    assert workload.pooling_of(5) == [3, 1, 3, 1, 3]
    assert WorkloadConfig(data="criteo").pooling_of(2) == [1, 1]
    assert WorkloadConfig(pooling=2.5).pooling_of(2) == [2.5, 2.5]
