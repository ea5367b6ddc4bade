"""The DLRM trains under plain torchrun; wrong arguments are named."""

import json
from pathlib import Path

import pytest
import yaml

from tests.cli.command import ROOT, python, torchrun
from tests.training.runs import small

SCRIPT = ROOT / "examples" / "dlrm" / "train.py"


def test_it_trains_under_torchrun(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(small(tmp_path / "run")))
    arguments = ("--standalone", "--nproc-per-node", 2, SCRIPT, "--config", config)
    done = torchrun(*arguments)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 24 and 0.5 < summary["eval_auc"] <= 1

    again = torchrun(*arguments)
    assert again.returncode != 0 and "holds a run already: use --resume" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "the following arguments are required: --config"),
        (("--config", "no.yaml"), "error: configuration file no.yaml does not exist"),
        (("--config", "configs/tiny.yaml", "--set", "stesp=3"), "stesp is unknown; did you mean"),
        (
            ("--config", "configs/tiny.yaml", "--set", "launch.device=cuda"),
            "error: launch.device is cuda, but torch finds no CUDA device",
        ),
        (
            ("--config", "configs/criteo_kaggle.yaml", "--set", "data.criteo.files=[no.txt]"),
            "data file no.txt does not exist",
        ),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], problem: str) -> None:
    done = python(SCRIPT, *arguments)
    assert done.returncode != 0 and problem in done.stderr
    assert "Traceback" not in done.stderr
