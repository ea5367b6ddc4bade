"""The towers learn what users like; wrong arguments are named."""

import re
import subprocess

import pytest

from tests.cli.command import ROOT, python, torchrun

SCRIPT = ROOT / "examples" / "two_towers.py"


def recalls(done: "subprocess.CompletedProcess[str]") -> tuple[float, float]:
    assert done.returncode == 0, done.stderr
    before, after = re.findall(r"^recall@10 (?:before|after) training: ([\d.]+)", done.stdout, re.M)
    return float(before), float(after)


def test_recall_rises_on_two_ranks() -> None:
    arguments = ("--standalone", "--nproc-per-node", 2, SCRIPT, "--steps", 150)
    done = torchrun(*arguments)
    before, after = recalls(done)
    assert before < 0.02 and after > 0.1
    assert "WARNING:fusedrec_torchrec" not in done.stderr
    for table in ("user.user", "views.viewed_item", "item.item", "item.category"):
        assert re.search(rf"^{re.escape(table)} +fused_\w+$", done.stdout, re.M), table


def test_it_trains_alone() -> None:
    before, after = recalls(python(SCRIPT, "--steps", 60, "--batch-size", 512))
    assert before < 0.02 and after > 2 * before


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--k", 0), "argument --k: is '0', must be a whole number from 1 to 2000"),
        (("--batch-size", "big"), "argument --batch-size: is 'big', must be a whole number from 2"),
        (("--stepps", 3), "unrecognized arguments: --stepps 3"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[object, ...], problem: str) -> None:
    done = python(SCRIPT, *arguments)
    assert done.returncode == 2 and problem in done.stderr
    assert "Traceback" not in done.stderr
