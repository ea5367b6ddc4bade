"""Small suites on real ranks: what comes out, and that nothing stays behind."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchrec.distributed.types import ParameterSharding

from fusedrec_torchrec.access.synthetic import BagKind
from fusedrec_torchrec.bench.bounds import bounded
from fusedrec_torchrec.bench.figures import WorkloadFigures
from fusedrec_torchrec.bench.links import hosts, unavailable
from fusedrec_torchrec.bench.ranks import RankError, Ranks
from fusedrec_torchrec.bench.results import RESULTS, load_results
from fusedrec_torchrec.bench.run import run_suite
from fusedrec_torchrec.bench.suite import (
    CODEC_SYSTEMS,
    DEDUP_PER_TABLE,
    HOT_SYSTEMS,
    PLANNED_SYSTEMS,
    STOCK_DEDUP,
    SYSTEMS,
    SuiteConfig,
    SystemName,
    WorkloadConfig,
)
from fusedrec_torchrec.cli.main import main
from tests.cli.command import ROOT, fusedrec
from tests.emulated_cuda import is_emulated
from tests.emulated_cuda.program import executable
from tests.warm import interpreter

TINY = WorkloadConfig(name="tiny", batch_size=64, tables=3, rows=50, dims=[8, 4], pooling=2)
QUICK = {"pairs": 5, "steps": 1, "warm_up": 2}


@pytest.fixture
def _warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", interpreter())


def namespaces() -> set[str]:
    """Those that this process has made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return set(re.findall(rf"^fusedrec{os.getpid()}\D\S*", listed.stdout, re.MULTILINE))


@pytest.mark.slow
def test_all_systems_with_bounds_stages_bytes_and_memory(tmp_path: Path) -> None:
    suite = SuiteConfig(**QUICK, workloads=[TINY])  # type: ignore[arg-type]
    document = run_suite(suite, {}, tmp_path, progress=False)
    assert load_results(tmp_path / RESULTS) == document
    (result,) = document["results"]
    figures = WorkloadFigures(result)
    named = {*HOT_SYSTEMS, *CODEC_SYSTEMS, *PLANNED_SYSTEMS, *STOCK_DEDUP, DEDUP_PER_TABLE}
    assert set(figures.systems) == set(SYSTEMS) - named
    assert all(len(times) == 5 for times in result["measured"]["seconds"].values())
    assert figures.fused is not None and figures.fused.collectives == 3
    assert figures.row_bytes == figures.least_row_bytes
    assert figures.id_bytes > 0
    assert figures.systems["table_wise"].collectives == 5
    stages = dict(figures.phases)
    step = stages.pop("step")
    assert sum(stages.values()) == pytest.approx(step)
    assert stages.pop("hot_rows") == stages.pop("hot_gradients") == 0
    assert all(value > 0 for value in stages.values())
    assert all(system.memory > 0 for system in figures.systems.values())
    text = json.dumps(document["machine"])
    assert str(Path.home()) not in text and os.uname().nodename not in text


@pytest.mark.usefixtures("_warm_ranks")
@pytest.mark.parametrize("bags", ["fresh", "repeated"])
def test_what_systems_send_is_what_batches_ask_for(tmp_path: Path, bags: BagKind) -> None:
    """Rows on the wire, against counts from batch and plan; our planner's plan is a system."""
    workload = dataclasses.replace(TINY, bags=bags)
    suite = SuiteConfig(
        **QUICK,  # type: ignore[arg-type]
        systems=[
            *("table_wise", "row_wise", "column_wise"),
            *("fused_row_wise", "fused_planner", "fused_profiled"),
        ],
        workloads=[workload],
    )
    document = run_suite(suite, {}, tmp_path, progress=False)
    assert not document["failed"]
    figures = WorkloadFigures(document["results"][0])
    requests = figures.measured["requests"]
    for name, system in figures.systems.items():
        assert sum(system.bytes_by_kind.values()) == system.bytes_sent
        assert system.bytes_by_kind["rows"] == requests[name]["unique_remote_bytes"], name
        assert system.bytes_by_kind["gradients"] == system.bytes_by_kind["rows"]
        assert system.rows_over_least is not None and system.rows_over_least >= 1
    stock = figures.systems["table_wise"].rows_over_least
    asked = requests["table_wise"]
    outputs = 2 * 64 * (8 + 4 + 8)  # elements, of all ranks
    assert stock == pytest.approx(outputs / asked["least_elements"])
    assert asked["distinct_bags"] < asked["outputs"] == 2 * 3 * 64
    assert figures.headline == "fused_planner"
    # Whoever has counted rows and bags knows what the fewest are; single batches differ.
    profiled = figures.systems["fused_profiled"].rows_over_least
    assert profiled is not None and profiled < 1.1


@pytest.mark.usefixtures("_warm_ranks")
def test_bounds_of_our_planners_plan_on_one_hot_data(tmp_path: Path) -> None:
    workload = dataclasses.replace(TINY, pooling=1, batch_size=256, zipf=1.3)
    suite = SuiteConfig(
        **QUICK,  # type: ignore[arg-type]
        systems=["planner", "fused_planner"],
        workloads=[workload],
    )
    document = run_suite(suite, {}, tmp_path, progress=False)
    assert not document["failed"]
    figures = WorkloadFigures(document["results"][0])
    assert all(name.startswith("fused_") for name in figures.planner_picks)
    assert len(figures.bound_seconds["exchange"]) == 5
    assert figures.fused is not None and figures.fused.collectives == 3
    assert figures.row_bytes == figures.least_row_bytes


@pytest.mark.usefixtures("_warm_ranks")
def test_torchrecs_own_dedup_is_for_sequences_on_cuda(tmp_path: Path) -> None:
    systems: list[SystemName] = ["row_wise_dedup", "fused_row_wise"]
    workloads = [
        dataclasses.replace(TINY, name="ec", module="ec", dims=[8], systems=systems),
        dataclasses.replace(TINY, name="ebc", systems=systems),
    ]
    suite = SuiteConfig(**QUICK, workloads=workloads)  # type: ignore[arg-type]
    document = run_suite(suite, {}, tmp_path, progress=False)
    assert not document["failed"]
    reasons = [result["measured"]["left_out"]["row_wise_dedup"] for result in document["results"]]
    assert reasons[0] == "TorchRec makes ids unique on CUDA only"
    assert reasons[1] == "TorchRec makes ids of sequences unique, not those of bags"


@pytest.mark.skipif(torch.cuda.is_available(), reason="as on a machine without a GPU")
def test_cuda_without_a_gpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = str(ROOT / "benchmarks" / "gpu.yaml")
    assert main(["bench", suite, "--output", str(tmp_path), "--quiet"]) == 2
    assert "device is cuda, but torch finds no CUDA device" in capsys.readouterr().err
    assert main(["bench", suite, "--validate-planner", "--output", str(tmp_path)]) == 2
    assert "device is cuda, must be cpu with --validate-planner" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_emulated():
        monkeypatch.setattr(sys, "executable", executable(tmp_path))
    ranks = min(2, torch.cuda.device_count())
    systems: list[SystemName] = ["table_wise", "planner", "fused_row_wise"]
    workloads = [
        dataclasses.replace(TINY, ranks=ranks, systems=systems),
        dataclasses.replace(TINY, name="too many", ranks=99),
        dataclasses.replace(TINY, name="link", ranks=ranks, link="1gbit"),
    ]
    suite = SuiteConfig(**QUICK, device="cuda", workloads=workloads)  # type: ignore[arg-type]
    document = run_suite(suite, {}, tmp_path, progress=False)
    assert not document["failed"]
    assert document["left_out"].keys() == {"too many", "link"}
    figures = WorkloadFigures(document["results"][0])
    assert set(figures.systems) == set(systems)
    assert figures.fused is not None and figures.fused.collectives == 3
    assert all(system.memory > 0 for system in figures.systems.values())


def test_plans_with_stock_tables_have_no_bounds() -> None:
    kinds = ("fused_row_wise", "fused_table_wise", "fused_column_wise", "table_wise")
    plan = {kind: ParameterSharding(kind, "fused") for kind in kinds}
    assert not bounded(plan)
    del plan["table_wise"]
    assert bounded(plan)


@pytest.mark.usefixtures("_warm_ranks")
def test_allocators_are_measured_one_after_the_other(tmp_path: Path) -> None:
    suite = SuiteConfig(
        **QUICK,  # type: ignore[arg-type]
        systems=["table_wise", "fused_row_wise"],
        allocators=["default", "keep", "jemalloc"],
        workloads=[TINY],
    )
    document = run_suite(suite, {}, tmp_path, progress=False)
    measured = [result["allocator"] for result in document["results"]]
    if "tiny, jemalloc" in document["left_out"]:
        measured.append("jemalloc")
    assert measured == ["default", "keep", "jemalloc"]
    assert main(["bench", str(tmp_path), "--quiet"]) == 0
    report = (tmp_path / "report.md").read_text()
    assert "| best stock / fused | best stock, memory kept | best stock / fused, memory" in report


@pytest.mark.slow
def test_systems_with_hot_rows(tmp_path: Path) -> None:
    """Seven of ten rows of a batch are hot; owners, hit rates and bytes by hand."""
    hot = WorkloadConfig(
        name="hot", batch_size=64, tables=2, rows=40, dims=[8], zipf=1.3, hot_rows=30, ranks=2
    )
    systems = ["row_wise", "fused_row_wise", "fused_hot_every_8"]
    only_hot = dataclasses.replace(
        hot, name="only hot", batches="hot", systems=["fused_hot_batches"]
    )
    suite = SuiteConfig(**QUICK, systems=systems, workloads=[hot, only_hot])  # type: ignore[arg-type]
    document = run_suite(suite, {}, tmp_path, progress=False)
    assert not document["failed"]
    mixed, hot_only = (WorkloadFigures(result) for result in document["results"])
    assert set(mixed.systems) == set(systems)
    asked = mixed.measured["owners"]
    assert sum(asked["row_wise"]) == asked["totals"][1] == 2 * 8 * 2 * 64
    assert sum(asked["fused_row_wise"]) == asked["totals"][0]
    share, ids_share = mixed.hits[100]  # all of the 80 rows
    assert share == ids_share == 1.0
    assert mixed.imbalance["row_wise"] >= 1 and mixed.imbalance["fused_hot"] >= 1
    fused, every = mixed.systems["fused_row_wise"], mixed.systems["fused_hot_every_8"]
    assert every.bytes_sent < fused.bytes_sent
    # A hot batch: an all-gather, and gradients with their slots to the other rank.
    batches = hot_only.measured["wire"]["fused_hot_batches"][0]
    assert [c["name"] for c in batches] == ["all_gather", "send"]
    assert sum(hot_only.measured["owners"]["fused_hot"]) == 0
    assert main(["bench", str(tmp_path), "--quiet"]) == 0
    assert (tmp_path / "hit_rates.png").is_file()
    assert "most asked owner / mean" in (tmp_path / "report.md").read_text()


@pytest.mark.usefixtures("_warm_ranks")
def test_too_few_hot_samples_are_an_error_that_says_so(tmp_path: Path) -> None:
    workload = WorkloadConfig(name="cold", batch_size=64, zipf=0.0, hot_rows=1, batches="hot")
    suite = SuiteConfig(**QUICK, systems=["fused_hot"], workloads=[workload])  # type: ignore[arg-type]
    document = run_suite(suite, {}, tmp_path, progress=False)
    assert "need the 1 most used rows only, 512 are wanted" in document["failed"]["cold"]


@pytest.mark.slow
def test_sequences_leave_out_what_cannot_run(tmp_path: Path) -> None:
    workload = WorkloadConfig(name="ec", module="ec", batch_size=32, tables=2, rows=30, dims=[8])
    suite = SuiteConfig(
        **QUICK,  # type: ignore[arg-type]
        systems=["row_wise", "data_parallel", "fused_row_wise"],
        workloads=[workload],
    )
    (result,) = run_suite(suite, {}, tmp_path, progress=False)["results"]
    assert set(result["measured"]["seconds"]) == {"row_wise", "fused_row_wise"}
    assert "fails on CPU" in result["measured"]["left_out"]["data_parallel"]
    figures = WorkloadFigures(result)
    assert figures.row_bytes == figures.least_row_bytes


@pytest.mark.usefixtures("_warm_ranks")
def test_the_error_of_a_rank_is_shown() -> None:
    suite = SuiteConfig(**QUICK)  # type: ignore[arg-type]
    broken = WorkloadConfig(name="broken", data="criteo", systems=["row_wise"])
    with (
        hosts(2, "") as places,
        Ranks("row_wise", suite, broken, "/nowhere", places) as ranks,
        pytest.raises(RankError, match=r"(?s)row_wise: rank . .*holds no prepared data"),
    ):
        ranks.wait_until_ready()


@pytest.mark.usefixtures("_warm_ranks")
def test_a_rank_that_dies_later_is_an_error_and_ends_the_others() -> None:
    suite = SuiteConfig(**QUICK)  # type: ignore[arg-type]
    with hosts(2, "") as places, Ranks("table_wise", suite, TINY, None, places) as ranks:
        ranks.wait_until_ready()
        ranks._processes[1].kill()
        with pytest.raises(RankError, match=r"table_wise: rank . ended with code"):
            ranks.ask("step", numbers=[0])
        processes = list(ranks._processes)
    assert all(process.poll() is not None for process in processes)


@pytest.mark.usefixtures("_warm_ranks")
def test_a_rank_that_dies_is_noticed_while_others_wait_for_it() -> None:
    """Rank 0 would look for rank 1 for ten minutes."""
    suite = SuiteConfig(**QUICK)  # type: ignore[arg-type]
    with hosts(2, "") as places, Ranks("table_wise", suite, TINY, None, places) as ranks:
        ranks._processes[1].kill()
        with pytest.raises(RankError, match="table_wise: rank 1 ended with code -9"):
            ranks.wait_until_ready()


def test_links_that_cannot_be_emulated_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unavailable("") is None
    assert "must be empty (loopback) or a rate" in str(unavailable("fast"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert unavailable("1gbit") == "link 1gbit needs root, to make network namespaces"
    with pytest.raises(ValueError, match="needs root"), hosts(2, "1gbit"):
        pass


@pytest.mark.usefixtures("_warm_ranks")
@pytest.mark.skipif(unavailable("1gbit") is not None, reason=str(unavailable("1gbit")))
def test_emulated_hosts_come_and_go(tmp_path: Path) -> None:
    before = namespaces()
    with hosts(2, "200mbit") as places:
        assert len(namespaces() - before) == 3
        ping = [*places[0].prefix, "ip", "-4", "-o", "address", "show", "dev", places[0].interface]
        assert "10.77.0.1/24" in subprocess.run(ping, capture_output=True, text=True).stdout
        shaped = [*places[1].prefix, "tc", "qdisc", "show", "dev", places[1].interface]
        assert "rate 200Mbit" in subprocess.run(shaped, capture_output=True, text=True).stdout
    assert namespaces() == before
    suite = SuiteConfig(
        **QUICK,  # type: ignore[arg-type]
        systems=["fused_row_wise"],
        workloads=[WorkloadConfig(name="far", batch_size=32, tables=2, rows=30, link="200mbit")],
    )
    (result,) = run_suite(suite, {}, tmp_path, progress=False)["results"]
    assert len(result["measured"]["seconds"]["fused_row_wise"]) == 5
    assert namespaces() == before


def test_the_command_writes_tables_and_plots_and_shows_them_again(tmp_path: Path) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text(
        "{pairs: 5, steps: 1, systems: [table_wise, fused_row_wise], workloads: ["
        "{name: small, tables: 2, rows: 50, dims: [8], sweep: {batch_size: [16, 32]}},"
        "{name: real, data: criteo}]}"
    )
    output = tmp_path / "out"
    done = fusedrec("bench", str(suite), "--output", str(output), "--quiet")
    assert done.returncode == 0, done.stderr
    assert "small, batch_size 16" in done.stdout
    assert "left out: real: needs data in Criteo's format: --data" in done.stdout
    names = {"speed_up.png", "breakdown.png", "bytes.png", "growth.png"}
    for name in names:
        assert (output / name).read_bytes().startswith(b"\x89PNG")
    assert "| workload |" in (output / "report.md").read_text()
    (output / "report.md").unlink()
    again = fusedrec("bench", str(output))
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[:6] == done.stdout.splitlines()[:6]
    assert (output / "report.md").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such.yaml"], "no_such.yaml does not exist"),
        (["--set", "pairs=2"], "pairs is 2"),
        (["--only", "nothing"], "no workload's name contains 'nothing'; there are 'zipf'"),
        (["."], "holds no results of a benchmark"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", *arguments, "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
