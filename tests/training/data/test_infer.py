"""Suggestions for files: a configuration that loads, says what it saw, and trains."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml

from fusedrec_torchrec.cli.main import main
from fusedrec_torchrec.core.config import from_mapping, load_yaml
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.data.infer import SKETCH, ColumnFacts
from fusedrec_torchrec.training.data.prepare import prepare_table
from tests.training.data.table_text import write_csv, write_table

Capture = pytest.CaptureFixture[str]


def columns(count: int) -> dict[str, pa.Array]:
    random = np.random.default_rng(0)
    return {
        "click": pa.array(random.integers(0, 2, count)),
        "user_id": pa.array(random.integers(0, 1500, count)),
        "type": pa.array([None if i % 10 == 0 else f"t{i % 4}" for i in range(count)]),
        "price in $": pa.array(random.random(count)),
        "tags": pa.array([[f"t{i % 6}"] * (i % 3) for i in range(count)]),
        "row": pa.array([f"r{i}" for i in range(count)]),
        "constant": pa.array([1] * count),
        "empty": pa.array([None] * count),
        "when": pa.array(1_511_540_000 + np.arange(count), pa.timestamp("s")),
    }


def test_a_suggestion_says_what_it_saw_and_can_be_prepared(tmp_path: Path, capsys: Capture) -> None:
    path = write_table(tmp_path / "clicks.parquet", columns(2000), rows=500)
    target = tmp_path / "configs" / "clicks.yaml"
    assert main(["prepare", str(path), "--infer", str(target), "--quiet"]) == 0
    text = target.read_text()
    assert text in capsys.readouterr().out
    config = from_mapping(TrainConfig, load_yaml(target))
    table = config.data.table
    assert table is not None and table.label == "click" and table.dense == ["price in $"]
    assert list(table.sparse) == ["user_id", "type", "tags", "hour_of_day", "weekday"]
    assert table.sparse["tags"].bag and table.sparse["type"].table == "type_table"
    assert table.timestamp is not None and table.timestamp.column == "when"
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    users = len(set(columns(2000)["user_id"].to_pylist()))
    assert f"{users:,} values, none missing; {users + 2:,} rows" in lines["user_id"]
    assert "4 values, 10.00% missing; 6 rows" in lines["type"]
    assert "4 values, 33.35% empty; 6 rows" in lines["tags"]
    assert 'left out: "row", nearly every row has a value of its own' in text
    assert 'left out: "constant", all its values are alike' in text
    assert 'left out: "empty", it has no value' in text
    data = prepare_table(table, tmp_path / "out", progress=False)
    assert data.samples == 2000 and data.table_rows["type_table"] == 6
    assert config.data.batch_size <= 200 and config.logging.directory == Path("runs/clicks")


def test_text_without_a_header_needs_names_and_a_label(tmp_path: Path, capsys: Capture) -> None:
    rows = [[f"{i % 50}", f"{i % 9}|{i % 4}", "pv" if i % 3 else "buy", str(1511539200 + i)]
            for i in range(300)]  # fmt: skip
    path = write_csv(tmp_path / "a.csv.gz", [*rows, ["bad"]])
    target = tmp_path / "a.yaml"
    base = ["prepare", str(path), "--infer", str(target), "--quiet"]
    base += ["--columns", "user,tags,behavior,time"]
    assert main(base) == 2
    assert "which column is the label? no column has just 0 and 1" in capsys.readouterr().err
    assert main([*base, "--label", "behavor == buy"]) == 2
    assert "names column 'behavor', which is not there; there are user" in capsys.readouterr().err
    assert main([*base, "--label", "behavior ="]) == 2
    assert "is no expression" in capsys.readouterr().err
    assert not target.exists()
    assert main([*base, "--label", "behavior == buy"]) == 0
    shown = capsys.readouterr().out
    assert "malformed:" in shown and ":301: 1 column, must be 4" in shown
    data = yaml.safe_load(target.read_text())["data"]["table"]
    assert data["csv"]["columns"] == ["user", "tags", "behavior", "time"]
    assert data["timestamp"] == {"column": "time", "unit": "s"}
    assert data["sparse"]["tags"] == {"bag": True, "separator": "|"}
    assert "# split: {by: time, start: 2017-11-24 16:04:29}" in target.read_text()


def test_one_column_of_flags_is_the_label_and_several_are_asked_for(
    tmp_path: Path, capsys: Capture
) -> None:
    flags = {"seen": [0, 1] * 20, "item": [f"i{i % 5}" for i in range(40)]}
    path = write_table(tmp_path / "a.parquet", flags)
    assert main(["prepare", str(path), "--infer", str(tmp_path / "a.yaml"), "--quiet"]) == 0
    assert "label: seen" in (tmp_path / "a.yaml").read_text()
    write_table(path, {**flags, "liked": [1, 0] * 20})
    assert main(["prepare", str(path), "--infer", str(tmp_path / "a.yaml"), "--quiet"]) == 2
    assert "seen, liked have 0 and 1: say --label COLUMN" in capsys.readouterr().err


def test_whole_numbers_are_ids_unless_they_crowd_at_the_lower_end(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    table = {
        "y": random.integers(0, 2, 5000),
        "item": random.integers(10**6, 10**7, 5000) // 2000,
        "bytes": np.exp(random.normal(5, 2, 5000)).astype(int),
        "bytes_id": np.exp(random.normal(5, 2, 5000)).astype(int),
    }
    path = write_table(tmp_path / "a.parquet", table)
    assert main(["prepare", str(path), "--infer", str(tmp_path / "a.yaml"), "--quiet"]) == 0
    data = yaml.safe_load((tmp_path / "a.yaml").read_text())["data"]["table"]
    assert data["dense"] == ["bytes"] and list(data["sparse"]) == ["item", "bytes_id"]


def test_many_values_are_estimated_in_little_memory() -> None:
    facts = ColumnFacts("x", "int64")
    for start in range(0, 200_000, 20_000):
        facts.add(pa.array(np.arange(start, start + 40_000)))
    assert len(facts.hashes) == SKETCH and not facts.exact
    assert facts.distinct == pytest.approx(220_000, rel=0.03)
    assert (facts.rows, facts.least, facts.greatest) == (400_000, 0, 219_999)


@pytest.mark.parametrize(
    "arguments",
    [
        ["a.csv"],
        ["--output", "out"],
        ["a.csv", "--output", "out", "--config", "c.yaml"],
        ["--infer", "x.yaml"],
        ["a.csv", "--infer", "x.yaml", "--output", "out"],
    ],
)
def test_arguments_that_do_not_go_together_are_refused(
    arguments: list[str], capsys: Capture
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["prepare", *arguments])
    assert stopped.value.code == 2 and "usage: fusedrec prepare" in capsys.readouterr().err


def test_files_that_are_no_text_are_sent_to_infer(tmp_path: Path, capsys: Capture) -> None:
    path = write_table(tmp_path / "a.parquet", {"y": [1]})
    assert main(["prepare", str(path), "--output", str(tmp_path / "out")]) == 2
    assert "is no text in Criteo's format: `fusedrec prepare" in capsys.readouterr().err
