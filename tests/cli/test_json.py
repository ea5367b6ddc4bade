"""``--json`` of every command that prints a table: documented keys, and nothing else on stdout."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fusedrec_torchrec.cli import json_output
from fusedrec_torchrec.cli.main import main, parser_of
from tests.cli.command import ROOT, fusedrec, python
from tests.cli.test_train import config
from tests.training.data.criteo_text import lines, write
from tests.watch.runs import whole_run

Capture = pytest.CaptureFixture[str]
PLAN = str(ROOT / "configs" / "planner" / "tiny.yaml")
DOCUMENT = (ROOT / "docs" / "commands.md").read_text().partition("## For programs")[2]
# They print a line or a script, no table.
NO_TABLE = {"separate", "completion", "checkpoint convert", "checkpoint export", "checkpoint"}


def documented(command: str) -> set[str]:
    """The keys that the document lists for a command."""
    cell = re.escape(command if "`" in command else f"`{command}`")
    row = re.search(rf"^\| {cell} \| (.*) \|$", DOCUMENT, re.MULTILINE)
    assert row, command
    return {key for key in re.findall(r"`([^`]+)`", row.group(1)) if key != "..._per_step"}


def answer(capsys: Capture, *arguments: object, code: int = 0) -> Any:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def commands(parser: argparse.ArgumentParser, name: str = "") -> dict[str, argparse.ArgumentParser]:
    named = {name: parser} if name else {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                named |= commands(inner, f"{name} {word}".strip())
    return named


def test_every_command_that_prints_a_table_has_it_and_is_documented() -> None:
    with_json = {
        name
        for name, parser in commands(parser_of()).items()
        if any("--json" in action.option_strings for action in parser._actions)
    }
    assert with_json == set(commands(parser_of())) - NO_TABLE
    assert all(re.search(rf"^\| `{name}`", DOCUMENT, re.MULTILINE) for name in with_json)


def test_version(capsys: Capture) -> None:
    assert set(answer(capsys, "version")) == {"version"}
    shown = answer(capsys, "version", "--verbose")
    assert set(shown) == documented("version") and "gloo" in shown["capabilities"]["backends"]


def test_watch(tmp_path: Path, capsys: Capture) -> None:
    shown = answer(capsys, "watch", whole_run(tmp_path))
    assert set(shown) == documented("watch")
    listed = DOCUMENT.partition("`runs` of `watch` has:")[2].partition("## ")[0]
    keys = {key for row in re.findall(r"^\| (`.*?) \|", listed, re.M) for key in row.split(", ")}
    assert {f"`{key}`" for key in shown["runs"][0]} == keys


def test_data(tmp_path: Path, capsys: Capture) -> None:
    text = write(tmp_path / "train.txt", lines(300))
    out = tmp_path / "out"
    shown = answer(capsys, "prepare", text, "--output", out)
    assert set(shown) == documented("prepare")
    assert shown["samples"] == 300 and len(shown["tables"]) == 26
    assert answer(capsys, "inspect", out) == {"kind": "prepared", **shown}
    hot = ["--save", tmp_path / "p.npz", "--hot-rows", "20", "--batch-size", "100"]
    assert set(answer(capsys, "profile", out, *hot)) == documented("profile")


def test_planner(tmp_path: Path, capsys: Capture) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    shown = answer(capsys, "plan", "--config", PLAN, "--out", first)
    assert set(shown) == documented("plan") and len(shown["tables"]) == 7
    assert shown["plans"][0] == {
        "name": "this plan",
        "step_ms": pytest.approx(shown["step_ms"]),
        "bytes_sent_per_rank": pytest.approx(shown["plans"][0]["bytes_sent_per_rank"]),
        "memory_of_the_fullest_rank": pytest.approx(max(shown["memory_by_rank"])),
    }
    assert len(shown["busy_ms_by_rank"]) == shown["ranks"] == 2
    assert main(["plan", "--config", PLAN, "--quiet", "--out", str(second), "--ranks", "4"]) == 0
    different = answer(capsys, "plan", "diff", first, second, code=1)
    assert set(different) == documented("plan diff")
    assert {"what": "ranks", "first": "2", "second": "4"} in different["differences"]
    assert answer(capsys, "plan", "diff", first, first) == {"differences": []}
    assert answer(capsys, "plan", "schema")["$schema"]
    plan = answer(capsys, "inspect", first)
    assert plan["kind"] == "plan" and documented("`inspect` a plan") <= set(plan)
    points = answer(
        capsys, "simulate", "--config", PLAN, "--ranks", "2", "--batches", "1", "--quiet"
    )
    assert set(points) == documented("simulate") and points["points"][0]["ranks"] == 2


def test_results_of_benchmarks(capsys: Capture) -> None:
    folder = ROOT / "benchmarks" / "results"
    shown = answer_in_copy(capsys, folder / "targets")
    assert set(shown) == documented("bench")
    workload = shown["workloads"][0]
    assert workload["speed_up"]["low"] <= workload["speed_up"]["median"]
    assert workload["systems"]["fused_row_wise"]["step_ms"] > 0


def answer_in_copy(capsys: Capture, folder: Path) -> Any:
    """Results were measured before; tables and plots are written beside them."""
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as copy:
        shutil.copy(folder / "results.json", copy)
        return answer(capsys, "bench", copy)


def test_a_run_its_checkpoint_and_its_plan(tmp_path: Path, capsys: Capture) -> None:
    """The table of the ranks, and what gloo prints, are not on standard output."""
    path = config(tmp_path, steps=12, eval_every=0, checkpoint={"every": 6})
    done = fusedrec("train", "--config", path, "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    per_step = {key for key in shown if key.endswith("_per_step")}
    assert per_step and set(shown) - per_step == documented("train")
    run = tmp_path / "run"
    checkpoint = answer(capsys, "checkpoint", "inspect", run)
    assert set(checkpoint) == documented("checkpoint inspect") and checkpoint["step"] == 12
    last = run / "checkpoints" / "step_00000012"
    assert answer(capsys, "inspect", last) == {**checkpoint, "kind": "checkpoint"}
    about = answer(capsys, "inspect", run)
    assert set(about) == documented("`inspect` a run") and about["evaluation"]["auc"] > 0
    whole = answer(capsys, "checkpoint", "verify", run, "--quiet")
    assert set(whole) == documented("checkpoint verify")
    assert whole["whole"] and whole["files_compared"] > 1
    data = next(last.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    damaged = answer(capsys, "checkpoint", "verify", run, "--quiet", code=1)
    assert not damaged["whole"] and data.name in damaged["problems"][0]
    assert damaged["before"] == str(run / "checkpoints" / "step_00000006")


SCRIPT = """
import argparse, os, subprocess, sys
from fusedrec_torchrec.cli.json_output import only_json, print_json
with only_json(True):
    print("a table")
    os.write(1, b"a library\\n")
    subprocess.run(["echo", "a process"], check=True)
    print_json({"number": float("nan"), "path": __import__("pathlib").Path("x"), "list": (1, 2)})
    print("more")
print("behind")
"""


def test_whatever_else_is_printed_goes_to_standard_error() -> None:
    done = python("-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    document, _, rest = done.stdout.rpartition("}\n")
    assert json.loads(document + "}") == {"number": None, "path": "x", "list": [1, 2]}
    assert rest == "behind\n"
    for text in ("a table", "a library", "a process", "more"):
        assert text in done.stderr


def test_after_an_error_there_is_no_answer(capsys: Capture) -> None:
    assert main(["inspect", "no", "--json"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and "no does not exist" in told.err
    with pytest.raises(AssertionError):
        json_output.print_json({})
