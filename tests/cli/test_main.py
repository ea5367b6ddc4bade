"""The command's answers: tables, help, exit codes."""

import io
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from fusedrec_torchrec.cli.main import main
from fusedrec_torchrec.core import native
from fusedrec_torchrec.core.config import options
from fusedrec_torchrec.core.terminal import human_bytes, print_table
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.data.prepared import PreparedData
from tests.cli.command import ROOT
from tests.training.data.criteo_text import lines, write

Capture = pytest.CaptureFixture[str]
LAUNCH = "fusedrec_torchrec.training.launch.launch"


def test_version(capsys: Capture) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("fusedrec-torchrec ")
    assert main(["version", "--verbose"]) == 0
    shown = capsys.readouterr().out
    for part in ("torch ", "torchrec ", "fbgemm-gpu-cpu ", "gloo", "fused kernels on CPU"):
        assert part in shown
    assert "C++ operators" in shown
    assert str(native.operators()) in shown


def test_help_explains_every_setting(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--help"])
    assert stopped.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for option in options(TrainConfig):
        assert f"{option.path}: {option.type} = {option.default} {option.description}" in shown
    for flag in ("--config", "--set", "--resume", "--overwrite", "--quiet"):
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
        (["sharding.exchange.hash_ids=[usr]"], "sharding.exchange.hash_ids names 'usr', which is"),
        (
            ["sharding.exchange.hash_ids=[user]", "sharding.tables.user=table_wise"],
            "hash_ids names 'user', whose sharding is table_wise, must be fused_row_wise",
        ),
        (
            ["sharding.hot.tables.country.ids=[5, 100]"],
            "sharding.hot.tables.country: id 100 is out of range [0, 100)",
        ),
        (["sharding.hot.tables.country.ids=[5, 5]"], "country: id 5 is there more than once"),
        (["sharding.hot.rule.top_k=10"], "sharding.hot.rule: top_k needs hot.profile"),
        (["sharding.hot.tables.user.memory=900"], "hot.tables.user: memory needs hot.profile"),
        (["data.synthetic.samples=1000"], "900 training samples do not fill one batch"),
        (["launch.device=cuda"], "launch.device is cuda, but torch finds no CUDA device"),
        (["launch.backend=nccl"], "launch.backend is nccl, which needs CUDA"),
        (
            ["logging.directory=/dev/null/run"],
            "logging.directory /dev/null/run cannot be written: /dev/null/run: Not a directory",
        ),
        (["model.dense_arch.0.x=1"], "'0' holds a value, not a section"),
        (["launch.nodes=2", "launch.rendezvous=a:1"], "--overwrite is for one machine"),
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
    monkeypatch.setattr(LAUNCH, lambda *_: pytest.fail("launched"))
    settings = [argument for override in overrides for argument in ("--set", override)]
    config = str(ROOT / "configs" / "tiny.yaml")
    assert main(["train", "--config", config, "--overwrite", *settings]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fusedrec train: ") and problem in error


def test_prepare_profile_and_inspect(tmp_path: Path, capsys: Capture) -> None:
    text = write(tmp_path / "train.txt", [*lines(900), "bad line"])
    out = tmp_path / "out"
    assert main(["prepare", str(text), "--output", str(out), "--quiet"]) == 2
    assert "train.txt:901: 1 column, must be 40 as in Criteo's format" in capsys.readouterr().err
    arguments = ["--output", str(out), "--quiet", "--on-bad-line", "skip"]
    assert main(["prepare", str(text), *arguments]) == 0
    shown = capsys.readouterr().out
    assert "samples                   900" in shown
    assert "malformed lines left out  1" in shown
    assert "train.txt:901: 1 column, must be 40 as in Criteo's format" in shown

    assert main(["inspect", str(out)]) == 0
    assert "cat_25" in capsys.readouterr().out

    plot = tmp_path / "plot.png"
    arguments = ["--batch-size", "100", "--plot", str(plot), "--quiet"]
    assert main(["profile", str(out), *arguments]) == 0
    shown = capsys.readouterr().out
    assert "accesses to 26 tables" in shown and "distinct ids in 100 samples" in shown
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main(["profile", str(out), *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["accesses"] == 900 * 26 and found["samples"] == 900
    ids = PreparedData.open(out).read(0, 900).ids.reshape(26, 9, 100)
    distinct = [[len(set(batch)) for batch in table] for table in ids.tolist()]
    assert found["distinct_in_a_batch"] == pytest.approx(sum(map(sum, distinct)) / (900 * 26))
    last = found["tables"][25]
    counts = sorted(Counter(ids[25].ravel().tolist()).values(), reverse=True)
    assert last["distinct_in_a_batch"] == pytest.approx(sum(distinct[25]) / 9)
    assert [count for _, count in last["top_rows"]] == counts[:3]
    assert last["top_1_percent"] == pytest.approx(counts[0] / 900)
    most = next(n for n in range(len(counts)) if sum(counts[:n]) >= 810)
    assert last["rows_for_90_percent"] == most

    assert main(["profile", str(text), "--batch-size", "100", "--quiet"]) == 2
    capsys.readouterr()
    arguments = ["--batch-size", "100", "--quiet", "--on-bad-line", "skip"]
    assert main(["profile", str(text), *arguments]) == 0
    again = capsys.readouterr()
    assert again.out == shown.rpartition("coverage curves")[0]
    assert "malformed lines were left out: 1 wrong number of columns" in again.err


def test_a_malformed_line_names_the_setting_as_it_is_spelled_there(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, out = write(tmp_path / "train.txt", ["bad line", *lines(99)]), tmp_path / "out"
    hint = "(to skip and count malformed lines, use {})\n"
    for command in (["prepare", str(text), "--output", str(out)], ["profile", str(text)]):
        assert main([*command, "--quiet"]) == 2
        assert capsys.readouterr().err.endswith(hint.format("--on-bad-line skip"))
    monkeypatch.setattr(LAUNCH, lambda *_: pytest.fail("launched"))
    criteo = f"data.criteo={{files: [{text}], prepared: {out}}}"
    settings = ["tables=[]", "data.source=criteo", criteo, "data.batch_size=8"]
    settings.append(f"logging.directory={tmp_path / 'run'}")
    flags = [flag for setting in settings for flag in ("--set", setting)]
    train = ["train", "--config", str(ROOT / "configs" / "tiny.yaml"), *flags]
    assert main(train) == 2
    assert capsys.readouterr().err.endswith(hint.format("data.criteo.on_bad_line: skip"))

    skip = ["prepare", str(text), "--output", str(out), "--quiet", "--on-bad-line", "skip"]
    assert main(skip) == 0
    assert main(skip[:-2]) == 2  # prepared already, without the line
    assert "was made with --on-bad-line skip, which left it out" in capsys.readouterr().err
    assert main([*skip, "--min-count", "2"]) == 2
    assert "otherwise: --min-count 1, now --min-count 2. Choose" in capsys.readouterr().err
    assert main([*train, "--set", "data.criteo.min_count=2"]) == 2
    assert "data.criteo.min_count: 1, now data.criteo.min_count: 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [["--min-count", "0"], ["--max-rows", "2"], ["--memory-mb", "much"]]
)
def test_numbers_out_of_range_are_wrong_usage(flags: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["prepare", "a.txt", "--output", "out", *flags])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert f"argument {flags[0]}: it is {flags[1]!r}, must be a whole number of at least" in error


TINY = str(ROOT / "configs" / "tiny.yaml")
PLAN = str(ROOT / "configs" / "planner" / "tiny.yaml")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["profile", TINY, "--plot", "."], "argument --plot: . is a folder, must be a file"),
        (["profile", TINY, "--plot", "x.foo"], "argument --plot: x.foo must end in one of .png"),
        (["profile", TINY, "--save", "."], "argument --save: . is a folder"),
        (["profile", TINY, "--hot-set", "."], "argument --hot-set: . is a folder"),
        (["profile", TINY, "--top", "-1"], "argument --top: it is '-1', must be a whole number"),
        (["profile", TINY, "--samples", "0"], "argument --samples: it is '0', must be"),
        (["profile", TINY, "--save", "x.npz", "--memory", "nan"], "--memory is nan MiB, must be"),
        (["simulate", "--config", PLAN, "--plot", "."], "argument --plot: . is a folder"),
        (["simulate", "--config", PLAN, "--seed", "-1"], "argument --seed: it is '-1', must be"),
        (["plan", "--config", PLAN, "--html", "."], "argument --html: . is a folder"),
        (["plan", "--config", PLAN, "--out", "."], "argument --out: . is a folder"),
        (["plan", "--config", "."], "configuration file . is a folder, must be a YAML file"),
        (["calibrate", "--output", "."], "argument --output: . is a folder"),
        (["calibrate", "--device", "cuda"], "--device is cuda, but torch finds no CUDA device"),
        (["bench", "."], ". holds no results of a benchmark (results.json is missing)"),
        (["prepare", "/dev/null", "--output", "out"], "/dev/null is neither a file nor a folder"),
    ],
)
def test_mistakes_of_the_command_line_are_exit_code_2_before_the_work_begins(
    arguments: list[str],
    problem: str,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(LAUNCH, lambda *_: pytest.fail("launched"))
    try:
        code = main([*arguments, "--quiet"])
    except SystemExit as stopped:  # of argparse
        code = stopped.code  # type: ignore[assignment]
    assert code == 2
    assert problem in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_paths_that_cannot_be_written_are_exit_code_2(tmp_path: Path, capsys: Capture) -> None:
    config = str(ROOT / "configs" / "tiny.yaml")
    target = str(tmp_path / "no" / "x.png")
    assert main(["profile", config, "--samples", "5000", "--quiet", "--plot", target]) == 2
    assert capsys.readouterr().err == f"fusedrec profile: {target}: No such file or directory\n"
    text = write(tmp_path / "a.tsv", lines(10))
    assert main(["prepare", str(text), "--output", str(text), "--quiet"]) == 2
    assert f"{text} is a file, must be a folder" in capsys.readouterr().err


def test_an_interrupt_is_exit_code_130(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fusedrec_torchrec.cli.version.run", interrupted)
    assert main(["version"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_profile_of_a_configuration(capsys: Capture) -> None:
    config = str(ROOT / "configs" / "tiny.yaml")
    assert main(["profile", config, "--samples", "5000", "--quiet", "--top", "1"]) == 0
    assert "history" in capsys.readouterr().out


def test_inspect_says_what_it_knows(tmp_path: Path, capsys: Capture) -> None:
    assert main(["inspect", str(tmp_path / "no")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path)]) == 2
    assert "holds nothing that inspect knows" in capsys.readouterr().err
    for text in ("plan: {a: {b: 1}}", "\x80"):
        (tmp_path / "x.yaml").write_bytes(text.encode("latin-1"))
        assert main(["inspect", str(tmp_path / "x.yaml")]) == 2
        assert "x.yaml is" in capsys.readouterr().err
    (tmp_path / "x.yaml").write_text("a: 1")
    assert main(["inspect", str(tmp_path / "x.yaml")]) == 2
    assert "is no plan file" in capsys.readouterr().err


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).with_name("fusedrec")
    done = subprocess.run([command, "version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("fusedrec-torchrec ")


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
