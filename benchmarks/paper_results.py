"""The stored results that docs/papers.md is made of, and what is simulated for it."""

import json
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from planner_docs import Scenario, points_of

from fusedrec_torchrec.bench.figures import WorkloadFigures
from fusedrec_torchrec.bench.report import Table
from fusedrec_torchrec.bench.results import RESULTS, load_results
from fusedrec_torchrec.planner.simulate import Point

__all__ = ["NOTHING", "Results", "points_of_all", "side_by_side"]

NOTHING = ""  # in a cell: not measured, or nothing to simulate
# As in docs/scaling.md, at the sizes that the papers name.
SCENARIOS = (
    Scenario(
        "fusedrec",
        "large_dlrm.yaml",
        (8, 128),
        ("cluster=../clusters/a100_infiniband.yaml", "dense.milliseconds=8"),
    ),
    Scenario(
        "groups",
        "large_dlrm.yaml",
        (256, 1024, 2048, 4096),
        ("dense.milliseconds=8", "dense.gradients_mb=40"),
    ),
    Scenario("hot", "criteo_like.yaml", (4, 32)),
)


def points_of_all() -> dict[str, Any]:
    """Simulates all scenarios."""
    return {s.name: [asdict(point) for point in points_of(s)[0]] for s in SCENARIOS}


class Results:
    """Reads the results of a folder; what was not measured is missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, name: str) -> dict[str, Any] | None:
        """Returns what a command of papers.py has stored; None if it was not run."""
        path = self._folder / f"{name}.json"
        if not path.is_file():
            return None
        stored: dict[str, Any] = json.loads(path.read_text())
        return stored

    @cached_property
    def _suite(self) -> list[WorkloadFigures]:
        if not (self._folder / RESULTS).is_file():
            return []
        document = load_results(self._folder / RESULTS)
        return [WorkloadFigures(result) for result in document["results"]]

    def workloads(self, series: str) -> list[WorkloadFigures]:
        """Returns the workloads of a series of benchmarks/papers.yaml that were measured."""
        return [w for w in self._suite if w.config.series == series]

    def point(self, scenario: str, system: str, ranks: int) -> Point | None:
        """Returns a system of a scenario at a size; None if nothing was simulated."""
        stored = self.of("simulated")
        if stored is None:
            return None
        points = [Point(**fields) for fields in stored[scenario]]
        return next(p for p in points if (p.system, p.ranks) == (system, ranks))


def side_by_side(rows: list[tuple[str, str, str, str]]) -> str:
    """Returns a table of what a paper reports, what was measured and what was simulated."""
    return Table("", ("", "the paper", "measured", "simulated"), list(rows)).markdown()
