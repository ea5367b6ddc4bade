"""``fusedrec plan`` and ``simulate`` as users run them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from fusedrec_torchrec.cli.main import main
from fusedrec_torchrec.core.config import from_mapping, load_yaml
from fusedrec_torchrec.planner.config import PlannerConfig, schema
from fusedrec_torchrec.planner.simulate import SYSTEMS
from fusedrec_torchrec.sharding.plan_file import read_plan
from fusedrec_torchrec.training.planner_files import read_planner_files
from fusedrec_torchrec.training.planning import planning_of
from tests.cli.command import ROOT

Capture = pytest.CaptureFixture[str]
CONFIGS = ROOT / "configs" / "planner"
TINY = CONFIGS / "tiny.yaml"


def test_a_plan_is_explained_and_written(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "deep" / "plan.yaml"
    assert main(["plan", "--config", str(TINY), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    for part in (
        *("7 tables", "on 2 ranks of one machine; 1024 samples a rank", "this plan"),
        *("all table_wise", "all row_wise", "busiest to mean", "what limits:", "what would help:"),
        *("dedup", "gradients", "█", f"plan: {out}"),
    ):
        assert part in shown, part
    for name in ("country", "history"):  # its price in each sharding
        assert re.search(rf"{name} .*fused_\w+( +[\d.e-]+){{7}}\n", shown)
    file, _ = read_plan(out)
    assert file.ranks == 2 and len(file.tables) == 7 and file.expected["step_ms"] > 0


def test_data_parallel_has_a_column_of_its_own(capsys: Capture) -> None:
    override = "search.tables={country: [data_parallel]}"
    assert main(["plan", "--config", str(TINY), "--set", override]) == 0
    shown = capsys.readouterr().out
    assert re.search(
        r"chosen +hot rows +fused +fused table +fused column +table +row +column +data parallel\n",
        shown,
    )
    assert re.search(r"country .* data_parallel( +[\d.e-]+){7}\n", shown)
    assert re.search(r"history .* fused_\w+( +[\d.e-]+){7}\n", shown)


def test_plans_differ_or_do_not(tmp_path: Path, capsys: Capture) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    rows = ["--set", "search.systems=[fused_row_wise]"]
    quiet = ["plan", "--config", str(TINY), "--quiet", *rows, "--out"]
    assert main([*quiet, str(first)]) == main([*quiet, str(second), "--ranks", "4"]) == 0
    capsys.readouterr()
    assert main(["plan", "diff", str(first), str(first)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main(["plan", "diff", str(first), str(second)]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"ranks +2 +4", shown) and "50 x 2" in shown and "25 x 4" in shown


@pytest.mark.slow
def test_the_plan_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Not the order of sets, nor anything else of a process."""
    texts = []
    for seed in ("1", "2"):
        out = tmp_path / seed / "plan.yaml"
        command = [sys.executable, "-m", "fusedrec_torchrec.cli.main", "plan", "--quiet"]
        command += ["--config", str(CONFIGS / "two_dimensional.yaml"), "--out", str(out)]
        command += ["--set", "ranks=64", "--set", "search.groups.sizes=[16, 32]"]
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, env=env, capture_output=True)
        texts.append(out.read_text())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_ready_configurations(path: Path) -> None:
    config = from_mapping(PlannerConfig, load_yaml(path), path.name)
    assert (CONFIGS / config.cluster).is_file()
    assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n")
    if config.profile is None:  # of data that is not here
        planning = planning_of(read_planner_files(path))
        assert planning.loads and planning.batch > 0


def test_the_schema_is_that_of_the_code(capsys: Capture) -> None:
    """`fusedrec plan schema > configs/planner/schema.json`"""
    assert json.loads((CONFIGS / "schema.json").read_text()) == json.loads(json.dumps(schema()))
    assert main(["plan", "schema"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["properties"]["cluster"]["description"].startswith("File of the cluster")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["serch.x=1"], "serch is unknown; did you mean 'search'"),
        (["search.systems=[tabel_wise]"], "search.systems.0 is 'tabel_wise'"),
        (["search.tables={movie: [row_wise]}"], "search.tables names 'movie', which is no table"),
        (["search.hot.memory=-1"], "search.hot.memory is -1"),
        (["cluster=nowhere.yaml"], "nowhere.yaml does not exist"),
        (["train=nowhere.yaml"], "nowhere.yaml does not exist"),
        (["profile=nowhere.npz"], "nowhere.npz"),
        (["train=null"], "exactly one of train and tables must say what to plan"),
        (["ranks=3"], "data.batch_size is 2048, must be a multiple of 3 ranks"),
        (["cluster=../clusters/a100_infiniband.yaml", "ranks=12"], "ranks is 12, must be at most"),
    ],
)
def test_mistakes_are_named(overrides: list[str], problem: str, capsys: Capture) -> None:
    arguments = ["plan", "--config", str(TINY), "--quiet"]
    for override in overrides:
        arguments += ["--set", override]
    assert main(arguments) == 2
    assert problem in capsys.readouterr().err


def test_too_little_memory_says_how_much(tmp_path: Path, capsys: Capture) -> None:
    cluster = yaml.safe_load((ROOT / "configs" / "clusters" / "one_machine.yaml").read_text())
    (tmp_path / "small.yaml").write_text(yaml.safe_dump({**cluster, "memory": 0.002}))
    override = f"cluster={tmp_path / 'small.yaml'}"
    assert main(["plan", "--config", str(TINY), "--set", override, "--quiet"]) == 2
    shown = capsys.readouterr().err
    assert re.search(r"table '\w+' does not fit: .* GB are missing", shown)


def test_wrong_words(capsys: Capture) -> None:
    assert main(["plan"]) == 2
    assert "--config is missing" in capsys.readouterr().err
    assert main(["plan", "dif", "a", "b"]) == 2
    assert "'dif a b' is unknown; allowed:" in capsys.readouterr().err


def test_sequences_and_stock_tables_are_planned(tmp_path: Path) -> None:
    config = {
        "cluster": str(ROOT / "configs" / "clusters" / "cpu_ethernet.yaml"),
        "batch_size": 256,
        "tables": [
            {"name": "clicks", "rows": 5000, "dim": 32, "sequence": True, "pooling": 20},
            {"name": "odd", "rows": 1000, "dim": 30},
            {"name": "shared", "rows": 1000, "dim": 64, "features": 3, "zipf": 1.1},
        ],
    }
    path, out = tmp_path / "plan_this.yaml", tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(config))
    assert main(["plan", "--config", str(path), "--out", str(out), "--quiet"]) == 0
    tables = read_plan(out)[0].tables
    assert tables["odd"].sharding != "fused_row_wise"  # 30 columns
    planning = planning_of(read_planner_files(path))
    loads = {load.name: load for load in planning.loads}
    assert not loads["clicks"].pooled and loads["clicks"].outputs == 20
    assert (loads["shared"].bags, loads["shared"].pooling) == (3, 3.0)


def test_simulate_prints_writes_and_draws(tmp_path: Path, capsys: Capture) -> None:
    arguments = ["simulate", "--config", str(CONFIGS / "large_dlrm.yaml"), "--quiet"]
    arguments += ["--ranks", "8,64", "--scaling", "both", "--batches", "1"]
    arguments += ["--plot", str(tmp_path / "s.png")]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "weak scaling, 512 samples a rank" in shown and "strong scaling" in shown
    assert main([*arguments, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert len(points) == 2 * 2 * len(SYSTEMS)
    assert np.array([point["seconds"] for point in points]).min() > 0
    assert (tmp_path / "s.png").stat().st_size > 10_000
    assert main([*arguments[:3], "--ranks", "64,8"]) == 2
    assert "must be ascending numbers" in capsys.readouterr().err
    assert main([*arguments[:3], "--ranks", "12"]) == 2
    assert "ranks is 12, must be at most 8" in capsys.readouterr().err
