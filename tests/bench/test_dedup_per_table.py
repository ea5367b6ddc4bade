"""The baseline that deduplicates and exchanges each table by itself, and what it is measured by."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fusedrec_torchrec.bench.figures import WorkloadFigures
from fusedrec_torchrec.bench.fusion import Fusion
from fusedrec_torchrec.bench.report import tables
from fusedrec_torchrec.bench.run import run_suite
from fusedrec_torchrec.bench.suite import SuiteConfig, WorkloadConfig
from fusedrec_torchrec.bench.systems import System, build
from fusedrec_torchrec.bench.workload import Workload, open_source
from fusedrec_torchrec.cli.main import main
from fusedrec_torchrec.core.collective_counter import CollectiveCounter
from fusedrec_torchrec.training.data.prepare import prepare_table
from fusedrec_torchrec.training.data.table_options import SparseOptions, TableOptions
from tests.cluster import Cluster
from tests.parity import local_parts
from tests.warm import interpreter

CONFIG = WorkloadConfig(name="tiny", batch_size=64, tables=3, rows=50, dims=[8, 4], pooling=2)
COLLECTIVES_OF_A_TABLE = 3  # ids, rows, gradients


def build_both() -> tuple[Workload, list[System]]:
    """Builds dedup by table and the fused exchange, with the same weights."""
    workload = Workload.make(CONFIG, open_source(CONFIG, None), dist.get_rank())
    names = ("dedup_per_table", "fused_row_wise")
    systems = [build(name, workload, torch.device("cpu")) for name in names]
    of_tables, of_fused = (local_weights(system) for system in systems)
    for table, weight in of_fused.items():
        of_tables[table].copy_(weight)
    return workload, systems


def local_weights(system: System) -> dict[str, torch.Tensor]:
    """Returns this rank's rows of each table."""
    state: dict[str, Any] = system.model.state_dict()
    return {key.split(".")[-2]: local_parts(value)[0][1] for key, value in state.items()}


def embeddings(system: System, batch: object) -> dict[str, torch.Tensor]:
    result: Any = system.model(batch)
    parts = result if isinstance(result, list) else [result]
    return {name: value for part in parts for name, value in part.to_dict().items()}


def train_both() -> None:
    workload, systems = build_both()
    before = {table: weight.clone() for table, weight in local_weights(systems[0]).items()}
    generator = torch.Generator().manual_seed(dist.get_rank())
    for batch in workload.batches[:3]:
        apart, fused = (embeddings(system, batch) for system in systems)
        assert set(apart) == set(fused) == set(workload.table_rows)
        gradients = {
            name: torch.randn(value.shape, generator=generator) for name, value in fused.items()
        }
        for outputs in (apart, fused):
            torch.stack([(outputs[n] * gradients[n]).sum() for n in gradients]).sum().backward()
        for name, value in fused.items():
            torch.testing.assert_close(apart[name], value)
    of_tables, of_fused = (local_weights(system) for system in systems)
    for table, weight in of_fused.items():
        assert not torch.equal(weight, before[table])
        torch.testing.assert_close(of_tables[table], weight)


def test_training_is_that_of_the_fused_exchange(cluster_2: Cluster) -> None:
    cluster_2.run(train_both)


def remote_distinct_rows(workload: Workload) -> dict[str, int]:
    """Returns how many rows the first batch needs of the other of two ranks, by table."""
    half = -(-CONFIG.rows // 2)
    return {
        table: int(
            (np.unique(workload.batches[0][table].values()) // half != dist.get_rank()).sum()
        )
        for table in workload.table_rows
    }


def count_messages() -> tuple[int, int, list[int], int]:
    workload, (apart, _) = build_both()
    apart.step(workload.batches[0])
    with CollectiveCounter() as forward:
        outputs = apart.forward(workload.batches[0])
    with CollectiveCounter() as backward:
        apart.backward(outputs)
    rows = [c.bytes_sent for c in forward.collectives if c.dtype == torch.float32]
    asked = remote_distinct_rows(workload).values()
    wanted = sum(4 * dim * n for dim, n in zip(workload.dims, asked, strict=True))
    return len(forward.collectives), len(backward.collectives), rows, wanted


def test_each_table_has_collectives_of_its_own_for_its_distinct_rows(cluster_2: Cluster) -> None:
    answers = cluster_2.run(count_messages)
    for forward, backward, rows, _ in answers:
        assert forward + backward == COLLECTIVES_OF_A_TABLE * CONFIG.tables
        assert len(rows) == CONFIG.tables
    # What both ranks send is what both ask for.
    assert sum(sum(rows) for *_, rows, _ in answers) == sum(wanted for *_, wanted in answers) > 0


def own_columns(folder: Path, bag: bool = False) -> str:
    """Prepares 700 samples of three columns; returns the folder."""
    lines = ["clicked,user,item,tags"]
    lines += [f"{i % 2},u{i % 97},i{i * i % 61},{i % 5}|{i % 3}" for i in range(700)]
    file = folder / "clicks.csv"
    file.write_text("\n".join(lines) + "\n")
    tags = SparseOptions(bag=bag, separator="|" if bag else None)
    sparse = {"user": SparseOptions(), "item": SparseOptions(), "tags": tags}
    options = TableOptions(files=[str(file)], label="clicked", sparse=sparse)
    prepare_table(options, folder / "prepared", progress=False)
    return str(folder / "prepared")


def test_fusing_is_told_apart_from_dedup_on_a_table_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", interpreter())
    workload = WorkloadConfig(name="clicks", data="table", batch_size=64, dims=[8])
    suite = SuiteConfig(
        pairs=5,
        steps=1,
        systems=["table_wise", "dedup_per_table", "fused_row_wise"],
        workloads=[workload],
    )
    document = run_suite(suite, {"table": own_columns(tmp_path)}, tmp_path / "out", progress=False)
    assert not document["failed"]
    figures = WorkloadFigures(document["results"][0])
    fusion = Fusion(figures)
    assert (fusion.apart.rounds, fusion.fused.rounds) == (9, 3)
    assert fusion.apart.small == fusion.fused.small == 1
    apart, fused = (figures.systems[name] for name in ("dedup_per_table", "fused_row_wise"))
    assert apart.bytes_by_kind["rows"] == fused.bytes_by_kind["rows"] > 0
    # What was repeated by itself is what the steps send, in the mean over the batches.
    replayed = figures.measured["replay_bytes"]
    assert replayed["dedup_per_table"] > replayed["fused_row_wise"]  # each header is one more
    assert replayed["fused_row_wise"] == pytest.approx(fused.bytes_sent, rel=0.2)
    assert fusion.bandwidth.low <= fusion.bandwidth.median <= fusion.bandwidth.high
    assert figures.best_stock is not None and figures.best_stock.name == "table_wise"
    assert any("dedup by table / fused" in table.title for table in tables([figures]))


def test_workloads_on_data_that_was_not_given_are_left_out(tmp_path: Path) -> None:
    workload = WorkloadConfig(name="clicks", data="table")
    document = run_suite(SuiteConfig(workloads=[workload]), {}, tmp_path, progress=False)
    assert "--table FOLDER" in document["left_out"]["clicks"]


def test_bags_of_ones_own_are_refused(tmp_path: Path) -> None:
    workload = WorkloadConfig(name="clicks", data="table")
    with pytest.raises(ValueError, match=r"features of .* are bags, must have one id each"):
        open_source(workload, own_columns(tmp_path, bag=True))


def test_a_folder_that_holds_no_data_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--table", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert "must be a folder of prepared data" in capsys.readouterr().err
