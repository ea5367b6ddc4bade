"""The command's answers: tables, help, exit codes."""

import io
import json
from pathlib import Path

import pytest

from fusedrec_torchrec.cli.main import main
from fusedrec_torchrec.config import options
from fusedrec_torchrec.terminal import human_bytes, print_table
from fusedrec_torchrec.training.config import TrainConfig
from tests.cli.command import ROOT, fusedrec
from tests.data.criteo_text import lines, write

Capture = pytest.CaptureFixture[str]


def test_version(capsys: Capture) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("fusedrec-torchrec ")
    assert main(["version", "--verbose"]) == 0
    shown = capsys.readouterr().out
    for part in ("torch ", "torchrec ", "fbgemm-gpu-cpu ", "gloo", "fused kernels on CPU"):
        assert part in shown


def test_help_explains_every_setting(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--help"])
    assert stopped.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for option in options(TrainConfig):
        assert f"{option.path}: {option.type} = {option.default} {option.description}" in shown
    for flag in ("--config", "--set", "--resume", "--overwrite"):
        assert flag in shown


@pytest.mark.parametrize("arguments", [[], ["fly"], ["train"], ["prepare", "x"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: fusedrec" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["modle.x=1"], "tiny.yaml: modle is unknown; did you mean 'model'?"),
        (["launch.ranks=3"], "data.lanes is 8, must be a multiple of the number of ranks, 3"),
        (["sharding.tables.movie=row_wise"], "sharding.tables names 'movie', which is no table"),
        (["data.synthetic.samples=1000"], "900 training samples do not fill one batch"),
        (["data.held_out=0.0001"], "90 held-out samples do not fill one evaluation batch"),
        (
            ["tables=[]", "data.source=criteo", "data.criteo={files: [no.tsv], prepared: x}"],
            "data file no.tsv does not exist",
        ),
        (
            ["tables=[]", "data.source=criteo", "data.criteo={prepared: nowhere}"],
            "nowhere holds no prepared data",
        ),
    ],
)
def test_what_cannot_run_is_exit_code_2_before_any_process_starts(
    overrides: list[str],
    problem: str,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fusedrec_torchrec.cli.train.launch", lambda *_: pytest.fail("launched"))
    settings = [argument for override in overrides for argument in ("--set", override)]
    assert main(["train", "--config", str(ROOT / "configs" / "tiny.yaml"), *settings]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fusedrec train: ") and problem in error


def test_prepare_profile_and_inspect(tmp_path: Path, capsys: Capture) -> None:
    text = write(tmp_path / "train.txt", [*lines(900), "bad line"])
    out = tmp_path / "out"
    assert main(["prepare", str(text), "--output", str(out), "--quiet"]) == 2
    assert "train.txt:901: 1 columns, must be 40" in capsys.readouterr().err
    arguments = ["--output", str(out), "--quiet", "--on-bad-line", "skip"]
    assert main(["prepare", str(text), *arguments]) == 0
    shown = capsys.readouterr().out
    assert "samples                   900" in shown
    assert "malformed lines left out  1" in shown
    assert "train.txt:901: 1 columns, must be 40" in shown

    assert main(["inspect", str(out)]) == 0
    assert "cat_25" in capsys.readouterr().out

    plot, figures = tmp_path / "plot.png", tmp_path / "figures.json"
    arguments = ["--batch-size", "100", "--plot", str(plot), "--json", str(figures), "--quiet"]
    assert main(["profile", str(out), *arguments]) == 0
    shown = capsys.readouterr().out
    assert "accesses to 26 tables" in shown and "distinct ids in 100 samples" in shown
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = json.loads(figures.read_text())
    assert found["accesses"] == 900 * 26 and found["samples"] == 900

    assert main(["profile", str(text), "--batch-size", "100", "--quiet"]) == 2
    capsys.readouterr()
    arguments = ["--batch-size", "100", "--quiet", "--on-bad-line", "skip"]
    assert main(["profile", str(text), *arguments]) == 0
    again = capsys.readouterr()
    assert again.out == shown.rpartition("coverage curves")[0]
    assert "malformed lines were left out: 1 wrong number of columns" in again.err


def test_profile_of_a_configuration(capsys: Capture) -> None:
    config = str(ROOT / "configs" / "tiny.yaml")
    assert main(["profile", config, "--samples", "5000", "--quiet", "--top", "1"]) == 0
    assert "history" in capsys.readouterr().out


def test_inspect_says_what_it_knows(tmp_path: Path, capsys: Capture) -> None:
    assert main(["inspect", str(tmp_path / "no")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path)]) == 2
    assert "holds nothing that inspect knows" in capsys.readouterr().err
    (tmp_path / "x.yaml").write_text("a: 1")
    assert main(["inspect", str(tmp_path / "x.yaml")]) == 2
    assert "is no plan file" in capsys.readouterr().err


def test_the_command_is_installed() -> None:
    done = fusedrec("version")
    assert done.returncode == 0 and done.stdout.startswith("fusedrec-torchrec "), done.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tables_are_drawn_on_a_terminal_and_plain_elsewhere() -> None:
    rows = [("a", 5, "1.5 KiB"), ("long name", 12345, "20 B")]
    plain, drawn = io.StringIO(), Terminal()
    print_table("title", ("name", "rows", "size"), rows, plain)
    assert plain.getvalue().splitlines() == [
        "title",
        "  name        rows     size",
        "  a              5  1.5 KiB",
        "  long name  12345     20 B",
    ]
    print_table("title", ("name", "rows", "size"), rows, drawn)
    assert "│" in drawn.getvalue() and "12345" in drawn.getvalue()


@pytest.mark.parametrize(
    ("count", "text"), [(5, "5 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5.0 TiB")]
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert human_bytes(count) == text
