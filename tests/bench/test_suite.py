"""Suites: sweeps, and what is refused."""

from pathlib import Path

import pytest

from fusedrec_torchrec.bench.suite import (
    CODEC_SYSTEMS,
    HOT_SYSTEMS,
    SYSTEMS,
    SuiteConfig,
    WorkloadConfig,
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
    assert set(SYSTEMS) == default | set(HOT_SYSTEMS) | set(CODEC_SYSTEMS)
