"""The smallest example trains, and differs from stock TorchRec by two lines."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.cli.command import ROOT, python, torchrun

OURS, STOCK = ROOT / "examples" / "minimal.py", ROOT / "examples" / "minimal_stock.py"


def losses(done: "subprocess.CompletedProcess[str]") -> list[float]:
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^step +(\d+)  loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in found] == [0, 10, 20, 30, 40]
    return [float(loss) for _, loss in found]


def test_two_imports_are_all_that_differs() -> None:
    ours, stock = OURS.read_text().splitlines(), STOCK.read_text().splitlines()
    assert len(ours) == len(stock) <= 60
    assert [pair for pair in zip(stock, ours, strict=True) if len(set(pair)) == 2] == [
        (
            "from torchrec.distributed.planner import EmbeddingShardingPlanner as Planner",
            "from fusedrec_torchrec import FusedShardingPlanner as Planner",
        ),
        (
            "from torchrec.distributed.sharding_plan import get_default_sharders as all_sharders",
            "from fusedrec_torchrec import fused_sharders as all_sharders",
        ),
    ]


def test_losses_on_two_ranks_are_those_of_stock_torchrec() -> None:
    arguments = ("--standalone", "--nproc-per-node", 2)
    ours, stock = (losses(torchrun(*arguments, script)) for script in (OURS, STOCK))
    assert ours == pytest.approx(stock, abs=2e-5)
    assert ours[-1] < ours[0] - 0.02


def test_it_trains_alone_in_any_folder(tmp_path: Path) -> None:
    ours, stock = (losses(python(script, cwd=tmp_path)) for script in (OURS, STOCK))
    assert ours == pytest.approx(stock, abs=2e-5)
    assert not list(tmp_path.iterdir())
