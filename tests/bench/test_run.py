"""Small suites on real ranks: what comes out, and that nothing stays behind."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from fusedrec_torchrec.bench.figures import WorkloadFigures
from fusedrec_torchrec.bench.links import hosts, unavailable
from fusedrec_torchrec.bench.ranks import RankError, Ranks
from fusedrec_torchrec.bench.run import RESULTS, load_results, run_suite
from fusedrec_torchrec.bench.suite import SYSTEMS, SuiteConfig, WorkloadConfig
from fusedrec_torchrec.cli.main import main
from tests.cli.command import fusedrec

TINY = WorkloadConfig(name="tiny", batch_size=64, tables=3, rows=50, dims=[8, 4], pooling=2)
QUICK = {"pairs": 5, "steps": 1, "warm_up": 2}


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return {line.split()[0] for line in listed.stdout.splitlines() if line}


def test_all_systems_with_bounds_stages_bytes_and_memory(tmp_path: Path) -> None:
    suite = SuiteConfig(**QUICK, workloads=[TINY])  # type: ignore[arg-type]
    document = run_suite(suite, None, tmp_path, progress=False)
    assert load_results(tmp_path / RESULTS) == document
    (result,) = document["results"]
    figures = WorkloadFigures(result)
    assert set(figures.systems) == set(SYSTEMS)
    assert all(len(times) == 5 for times in result["measured"]["seconds"].values())
    assert figures.fused is not None and figures.fused.collectives == 3
    assert figures.row_bytes == figures.least_row_bytes
    assert figures.id_bytes > 0
    assert figures.systems["table_wise"].collectives == 5
    stages = dict(figures.phases)
    step = stages.pop("step")
    assert sum(stages.values()) == pytest.approx(step)
    assert all(value > 0 for name, value in stages.items() if name != "other")
    assert stages["other"] > 0
    assert all(system.memory > 0 for system in figures.systems.values())
    text = json.dumps(document["machine"])
    assert str(Path.home()) not in text and os.uname().nodename not in text


def test_sequences_leave_out_what_cannot_run(tmp_path: Path) -> None:
    workload = WorkloadConfig(name="ec", module="ec", batch_size=32, tables=2, rows=30, dims=[8])
    suite = SuiteConfig(
        **QUICK,  # type: ignore[arg-type]
        systems=["row_wise", "data_parallel", "fused_row_wise"],
        workloads=[workload],
    )
    (result,) = run_suite(suite, None, tmp_path, progress=False)["results"]
    assert set(result["measured"]["seconds"]) == {"row_wise", "fused_row_wise"}
    assert "fails on CPU" in result["measured"]["left_out"]["data_parallel"]
    figures = WorkloadFigures(result)
    assert figures.row_bytes == figures.least_row_bytes


def test_the_error_of_a_rank_is_shown() -> None:
    suite = SuiteConfig(**QUICK)  # type: ignore[arg-type]
    broken = WorkloadConfig(name="broken", data="criteo", systems=["row_wise"])
    with (
        hosts(2, "") as places,
        Ranks("row_wise", suite, broken, "/nowhere", places) as ranks,
        pytest.raises(RankError, match=r"(?s)row_wise: rank . .*holds no prepared data"),
    ):
        ranks.wait_until_ready()


def test_a_rank_that_dies_later_is_an_error_and_ends_the_others() -> None:
    suite = SuiteConfig(**QUICK)  # type: ignore[arg-type]
    with hosts(2, "") as places, Ranks("table_wise", suite, TINY, None, places) as ranks:
        ranks.wait_until_ready()
        ranks._processes[1].kill()
        with pytest.raises(RankError, match=r"table_wise: rank . ended with code"):
            ranks.ask("step", numbers=[0])
        processes = list(ranks._processes)
    assert all(process.poll() is not None for process in processes)


def test_links_that_cannot_be_emulated_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unavailable("") is None
    assert "must be empty (loopback) or a rate" in str(unavailable("fast"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert unavailable("1gbit") == "link 1gbit needs root, to make network namespaces"
    with pytest.raises(ValueError, match="needs root"), hosts(2, "1gbit"):
        pass


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
    (result,) = run_suite(suite, None, tmp_path, progress=False)["results"]
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
