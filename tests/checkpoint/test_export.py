"""Tables as safetensors and Parquet, read by other libraries; and the command line."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from fusedrec_torchrec.checkpoint import export as module
from fusedrec_torchrec.checkpoint.contents import Contents
from fusedrec_torchrec.checkpoint.export import export_table
from fusedrec_torchrec.cli.main import main
from tests.checkpoint.test_round_trips import Numbers, train_and_save
from tests.cluster import Cluster


@pytest.fixture(scope="module")
def saved(cluster_2: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Numbers]:
    folder = tmp_path_factory.mktemp("saved") / "it"
    return folder, cluster_2.run(train_and_save, "fused_row_wise", 2, str(folder), {})[0]


@pytest.mark.parametrize("at_once", [1, 1000, 1 << 20])
@pytest.mark.parametrize("form", ["safetensors", "parquet"])
def test_other_libraries_read_the_tables(
    saved: tuple[Path, Numbers],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    at_once: int,
) -> None:
    """In pieces of any size."""
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    folder, (weights, states) = saved
    contents = Contents(folder)
    for name, table in contents.tables.items():
        path = export_table(contents, table, tmp_path, form, with_states=True)
        if form == "safetensors":
            found = load_file(path)
            weight, state = found["weight"], found["momentum1"].flatten()
        else:
            read = pq.read_table(path)
            assert read["row"].to_pylist() == list(range(table.rows))
            flat = read["weight"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            weight = torch.from_numpy(flat.copy()).view(table.rows, table.columns)
            state = torch.from_numpy(read["momentum1"].to_numpy().astype(np.float32))
        assert weight.dtype == table.dtype
        assert torch.equal(weight.double(), weights[name])
        assert torch.equal(state.double(), states[name])
    assert not list(tmp_path.glob(".*"))


def test_commands(
    saved: tuple[Path, Numbers], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, (weights, _) = saved

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["checkpoint", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    code, out, _ = run("inspect", folder)
    assert code == 0 and "fused_row_wise" in out and "41 x 8" in out and "float16" in out
    code, out, _ = run("inspect", folder, "--json")
    assert json.loads(out)["tables"]["a"]["optimizer"] == {
        "momentum1": "optimizer.state.sparse.embedding_bags.a.weight.a.momentum1"
    }
    other = tmp_path / "other"
    code, out, _ = run(
        *("convert", folder, other, "--world-size", 3, "--sharding", "row_wise"),
        *("--table", "a=table_wise", "--table", "b=data_parallel", "--quiet"),
    )
    assert code == 0 and "4 tables for 3 ranks" in out
    code, out, _ = run("inspect", other, "--json")
    tables = json.loads(out)["tables"]
    assert {name: table["sharding"] for name, table in tables.items()} == {
        "a": "table_wise", "b": "data_parallel", "c": "row_wise", "d": "row_wise"
    }  # fmt: skip
    assert tables["b"]["optimizer"].keys() == {"sum", "step"} and tables["c"]["shards"] == 3
    assert run("verify", other, "--quiet")[0] == 0
    contents = Contents(other)
    assert contents.reader.whole(contents.tables["b"].states["step"]).item() == 3  # of the run
    code, out, _ = run("export", other, "--output", tmp_path / "out", "--tables", "b,a", "--quiet")
    assert code == 0 and "2 tables as safetensors" in out
    exported = load_file(tmp_path / "out" / "b.safetensors")["weight"]
    assert torch.equal(exported.double(), weights["b"])
    # What cannot be.
    for arguments, problem in [
        (("convert", folder, other), "exists already"),
        (("convert", folder, tmp_path / "x", "--table", "q=row_wise"), "'q' is no table"),
        (("convert", folder, tmp_path / "x", "--table", "a"), "must be NAME=SHARDING"),
        (("convert", folder, tmp_path / "x", "--table", "a=odd"), "sharding is 'odd', must be one"),
        (("convert", folder, tmp_path / "x", "--world-size", "0"), "must be at least 1"),
        (("export", folder, "--output", tmp_path, "--tables", "q"), "'q', which is no table"),
        (("inspect", tmp_path / "nowhere"), "does not exist"),
        (("verify", tmp_path), "is no checkpoint"),
    ]:
        code, _, err = run(*arguments)
        assert code == 2 and problem in err, (arguments, err)
    with (other / "plan.yaml").open("a") as file:
        file.write("#")
    code, out, _ = run("verify", other, "--quiet")
    assert code == 1 and "plan.yaml has" in out and "damaged" in out
    code, _, err = run("convert", other, tmp_path / "x", "--quiet")
    assert code == 2 and "is damaged: plan.yaml has" in err
    assert not (tmp_path / "x").exists()


def test_names_that_are_no_file_names(saved: tuple[Path, Numbers], tmp_path: Path) -> None:
    contents = Contents(saved[0])
    table = replace(contents.tables["a"], name="../escaped")
    for form in ("safetensors", "parquet"):
        with pytest.raises(ValueError, match="has a name that no file in"):
            export_table(contents, table, tmp_path / "out", form)
    assert not (tmp_path / "escaped.safetensors").exists()


def test_a_plan_for_other_tables(saved: tuple[Path, Numbers], tmp_path: Path) -> None:
    folder, _ = saved
    text = (folder / "plan.yaml").read_text()
    (tmp_path / "plan.yaml").write_text(text.replace("rows: 50", "rows: 51"))
    plan = str(tmp_path / "plan.yaml")
    target = str(tmp_path / "x")
    code = main(["checkpoint", "convert", str(folder), target, "--plan", plan, "--quiet"])
    assert code == 2 and not (tmp_path / "x").exists()
