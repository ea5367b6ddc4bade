"""What a checkpoint says of how ids are hashed, without which its rows mean nothing."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

import fusedrec_torchrec as fr
from fusedrec_torchrec.checkpoint.contents import Contents
from fusedrec_torchrec.checkpoint.export import export_table
from fusedrec_torchrec.checkpoint.file_names import MANIFEST
from fusedrec_torchrec.checkpoint.load import load_checkpoint
from fusedrec_torchrec.checkpoint.save import save_checkpoint
from fusedrec_torchrec.cli.main import main
from fusedrec_torchrec.exchange.hashing import table_salt
from tests.case import Case, Table, sharded
from tests.cluster import Cluster


def hashed(folder: str, seed: int | None, save_it: bool) -> str | None:
    tables = (Table("a", 50), Table("b", 33))
    case = Case(tables=tables, batch_sizes=(5, 5), optimizer="adagrad")
    options = (
        fr.ExchangeOptions() if seed is None else fr.ExchangeOptions(hash_ids=["a"], hash_seed=seed)
    )
    model = sharded(case, options)
    optimizer: Any = model.fused_optimizer
    if save_it:
        save_checkpoint(folder, model, optimizer)
        return None
    try:
        load_checkpoint(folder, model, optimizer)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("saved", "loaded", "problem"),
    [
        (3, 3, None),
        (None, None, None),
        (3, 4, "'a' was trained with ids hashed with hash_seed 3, the model has ids hashed with"),
        (3, None, "'a' was trained with ids hashed with hash_seed 3, the model has ids that are"),
        (None, 3, "'a' was trained with ids that are rows, the model has ids hashed with"),
    ],
)
def test_another_hash_is_refused(
    cluster_2: Cluster, tmp_path: Path, saved: int | None, loaded: int | None, problem: str | None
) -> None:
    cluster_2.run(hashed, str(tmp_path / "it"), saved, True)
    found = cluster_2.run(hashed, str(tmp_path / "it"), loaded, False)
    for error in found:
        assert (error is None) if problem is None else (problem in error)


def test_a_conversion_keeps_what_is_known_of_hashing(
    cluster_2: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, fused, stock = (tmp_path / name for name in ("saved", "fused", "stock"))
    cluster_2.run(hashed, str(saved), 3, True)
    assert main(["checkpoint", "convert", str(saved), str(fused), "--quiet"]) == 0
    assert "hash" not in capsys.readouterr().err
    assert cluster_2.run(hashed, str(fused), 3, False) == [None, None]
    assert "hash_seed 3" in cluster_2.run(hashed, str(fused), None, False)[0]
    command = ["checkpoint", "convert", str(saved), str(stock), "--sharding", "row_wise", "--quiet"]
    assert main(command) == 0
    assert "'a' were hashed with hash_seed 3" in capsys.readouterr().err
    # Without a manifest nobody knows, and nobody may claim to.
    (saved / MANIFEST).unlink()
    unknown = tmp_path / "unknown"
    assert main(["checkpoint", "convert", str(saved), str(unknown), "--quiet"]) == 0
    for seed in (3, None):
        assert cluster_2.run(hashed, str(unknown), seed, False) == [None, None]


def test_an_export_says_how_ids_are_hashed(cluster_2: Cluster, tmp_path: Path) -> None:
    cluster_2.run(hashed, str(tmp_path / "it"), 3, True)
    contents = Contents(tmp_path / "it")
    for name in ("a", "b"):
        path = export_table(contents, contents.tables[name], tmp_path, "safetensors")
        with safe_open(path, "pt") as file:
            about = file.metadata()
        salt = {"hash_seed": "3", "hash_salt": str(table_salt("a", 3))} if name == "a" else {}
        assert about == {"table": name, **salt}
        path = export_table(contents, contents.tables[name], tmp_path, "parquet")
        in_parquet = {k.decode(): v.decode() for k, v in pq.read_schema(path).metadata.items()}
        assert in_parquet == about
