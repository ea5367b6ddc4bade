"""``fusedrec watch`` as users run it."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from fusedrec_torchrec.cli.main import main
from tests.cli.command import ROOT
from tests.watch.runs import record, whole_run, write_run

Capture = pytest.CaptureFixture[str]


def test_once_prints_one_frame_and_ends(tmp_path: Path, capsys: Capture) -> None:
    one, other = whole_run(tmp_path / "one"), write_run(tmp_path / "other", [record(10)])
    assert main(["watch", str(one), str(other), "--once"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("Log loss") == 1 and "50 of 50" in shown and "10 of 50" in shown
    assert main(["watch", str(one), str(other)]) == 0  # no terminal: the same
    assert capsys.readouterr().out == shown


def test_json_has_the_figures(tmp_path: Path, capsys: Capture) -> None:
    assert main(["watch", str(whole_run(tmp_path)), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["runs"][0]["latest"]["auc"] == {"eval": 0.75}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["no"], "no does not exist; it must be the folder of a run"),
        (["."], ". is no run, it has neither metrics.jsonl nor config.yaml"),
        (["--web", "runs/tiny"], "it is 'runs/tiny', must be a port from 0 to 65535; runs stand"),
        ([".", "--web", "70000"], "it is '70000', must be a port from 0 to 65535"),
        ([".", "--every", "0"], "it is '0', must be from 0.1 to 3600 seconds"),
        ([], "the following arguments are required: RUN"),
    ],
)
def test_mistakes_say_what_to_do(
    arguments: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["watch", *arguments])
    except SystemExit as stopped:  # of argparse
        code = stopped.code  # type: ignore[assignment]
    assert code == 2 and problem in capsys.readouterr().err


def test_the_page_is_served_until_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fusedrec_torchrec.cli.main", "watch"]
    process = subprocess.Popen(
        [*command, str(whole_run(tmp_path / "tiny")), "--web", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.split()[0]
        assert url.startswith("http://127.0.0.1:") and "shows tiny; Ctrl-C ends it" in line
        with urllib.request.urlopen(f"{url}data.json", timeout=10) as answer:
            assert json.load(answer)["runs"][0]["name"] == "tiny"
        port = url.rpartition(":")[2].strip("/")
        assert main(["watch", str(tmp_path / "tiny"), "--web", port]) == 2  # it is taken
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and errors == ""
