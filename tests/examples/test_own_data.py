"""Data of one's own is trained on; a model without sharding predicts what was trained."""

import re
import subprocess
from pathlib import Path

import polars as pl
import pytest

from tests.cli.command import ROOT, python, torchrun

SCRIPT = ROOT / "examples" / "own_data.py"


def aucs(done: "subprocess.CompletedProcess[str]") -> tuple[float, float]:
    """Returns the AUC of the training and that of the model without sharding."""
    assert done.returncode == 0, done.stderr
    assert "into a model without sharding" in done.stdout
    training, unsharded = re.findall(r"^AUC of .*: ([\d.]+)$", done.stdout, re.MULTILINE)
    return float(training), float(unsharded)


def clicks(path: Path) -> Path:
    rows = 3000
    frame = {
        "clicked": [i % 7 % 2 for i in range(rows)],
        "price": [i % 90 / 2 for i in range(rows)],
        "item": [f"item {i % 7}" for i in range(rows)],
        "user": [i * 31 % 40 for i in range(rows)],
        "tags": [["new", "red"][: i % 3] for i in range(rows)],
    }
    pl.DataFrame(frame).write_parquet(path)
    return path


def test_an_iterable_on_two_ranks_then_again(tmp_path: Path) -> None:
    arguments = (SCRIPT, "batches", "--directory", tmp_path / "run")
    training, unsharded = aucs(torchrun("--standalone", "--nproc-per-node", 2, *arguments))
    assert training > 0.7 and unsharded == pytest.approx(training, abs=2e-4)

    again = python(*arguments)
    assert again.returncode == 1 and "Traceback" not in again.stderr
    assert "holds a run already: use --resume to go on with it, --overwrite" in again.stderr


def test_a_frame_and_going_on(tmp_path: Path) -> None:
    arguments = (SCRIPT, "frame", "--directory", tmp_path / "run")
    training, unsharded = aucs(python(*arguments))
    assert training > 0.7 and unsharded == pytest.approx(training, abs=2e-4)
    resumed = aucs(python(*arguments, "--resume"))
    assert resumed == pytest.approx((training, unsharded), abs=2e-4)


def test_a_file_of_parquet(tmp_path: Path) -> None:
    columns = ("--label", "clicked", "--dense", "price", "--sparse", "item,user", "--bags", "tags")
    arguments = (SCRIPT, clicks(tmp_path / "clicks.parquet"), *columns, "--batch-size", 64)
    training, unsharded = aucs(python(*arguments, "--directory", tmp_path / "run"))
    assert training > 0.9 and unsharded == pytest.approx(training, abs=2e-4)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "the following arguments are required: data"),
        (("nothing.parquet",), "nothing.parquet does not exist; give batches, frame, or a file"),
        (("clicks.parquet",), "Give --label, and --sparse or --bags; `fusedrec prepare clicks.p"),
        (
            ("clicks.parquet", "--label", "clicked", "--sparse", "itm"),
            "data.table.sparse.itm names column 'itm', which clicks.parquet does not have; there",
        ),
        (
            ("clicks.parquet", "--label", "clicked", "--sparse", "item", "--batch-size", "4000"),
            "training samples do not fill one batch of data.batch_size 4000",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, arguments: tuple[str, ...], problem: str) -> None:
    clicks(tmp_path / "clicks.parquet")
    done = python(SCRIPT, *arguments, cwd=tmp_path)
    assert done.returncode != 0 and problem in done.stderr
    assert "Traceback" not in done.stderr
