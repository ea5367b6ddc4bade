"""Writes the figures of docs/predictions.md and docs/scaling.md.

    python benchmarks/planner_docs.py

Predictions and measurements are in benchmarks/results/planner, from `make planner`.  Scaling is
computed here, by the simulator, and kept in benchmarks/results/scaling for charts.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ranks import write_into

from fusedrec_torchrec.bench.report import Table
from fusedrec_torchrec.bench.validate import (
    VALIDATION,
    Comparison,
    best_systems,
    draw_validation,
    verdict,
)
from fusedrec_torchrec.core.files import write_json
from fusedrec_torchrec.planner.report.scaling_plot import draw_scaling
from fusedrec_torchrec.planner.simulate import Point, simulate
from fusedrec_torchrec.training.planner_files import read_planner_files
from fusedrec_torchrec.training.planning import planning_of

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks" / "results" / "planner"
SCALING = ROOT / "benchmarks" / "results" / "scaling"
FIGURES = ROOT / "docs" / "figures"


@dataclass(frozen=True)
class Scenario:
    """A figure of docs/scaling.md."""

    name: str
    config: str
    ranks: tuple[int, ...]
    overrides: tuple[str, ...] = ()


SCENARIOS = (
    Scenario(
        "fusedrec",
        "large_dlrm.yaml",
        (8, 16, 32, 64, 128),
        ("cluster=../clusters/a100_infiniband.yaml", "dense.milliseconds=8"),
    ),
    Scenario(
        "groups",
        "large_dlrm.yaml",
        (8, 64, 128, 256, 512, 1024, 2048, 4096),
        ("dense.milliseconds=8", "dense.gradients_mb=40"),
    ),
    Scenario("hot", "criteo_like.yaml", (4, 8, 16, 32)),
)


def validation(comparisons: list[Comparison]) -> dict[str, str]:
    """Returns what all comparisons say in a few lines, and tables of them, by their marker."""
    rows: list[tuple[str, ...]] = [
        (
            c.workload,
            c.system,
            f"{c.bytes_measured / 1024:,.0f}",
            f"{c.bytes_off:+.1%}",
            f"{1e3 * c.seconds_measured:.1f}",
            f"{1e3 * c.seconds_predicted:.1f}",
            f"{c.seconds_off:+.0%}",
        )
        for c in comparisons
    ]
    columns = ("workload", "system", "KiB", "predicted", "ms", "predicted ms", "off by")
    best = Table(
        "",
        ("workload", "predicted best", "measured best", "slower by"),
        [
            (name, *names, f"{slower:.1%}")
            for name, (*names, slower) in best_systems(comparisons).items()
        ],
    )
    overall = "\n".join(f"- {line}" for line in verdict(comparisons))
    return {
        "validation": overall,
        "best systems": best.markdown(),
        "comparisons": Table("", columns, rows).markdown(),
    }


def points_of(scenario: Scenario) -> tuple[list[Point], str]:
    """Simulates a scenario; returns its points and the name of its cluster."""
    path = ROOT / "configs" / "planner" / scenario.config
    overrides = [*scenario.overrides, f"ranks={scenario.ranks[0]}"]
    planning = planning_of(read_planner_files(path, overrides))
    return list(simulate(planning, scenario.ranks, ["weak"])), planning.cluster.name


def scaling(points: list[Point]) -> str:
    """Returns a table of throughput by system and ranks, and of a rank's share of its first one."""
    systems = list(dict.fromkeys(point.system for point in points))
    first = {s: next(p for p in points if p.system == s and p.seconds) for s in systems}
    rows: list[tuple[str, ...]] = []
    for ranks in dict.fromkeys(point.ranks for point in points):
        row = [str(ranks)]
        for system in systems:
            point = next(p for p in points if (p.system, p.ranks) == (system, ranks))
            if not point.seconds:
                row.append("does not fit")
                continue
            share = point.throughput / point.ranks
            share /= first[system].throughput / first[system].ranks
            row.append(f"{point.throughput / 1e6:.2f} M ({share:.0%})")
        last = next(p for p in points if (p.system, p.ranks) == (systems[-1], ranks))
        stock = next(p for p in points if (p.system, p.ranks) == ("TorchRec", ranks))
        hot = next(p for p in points if (p.system, p.ranks) == ("fused + hot rows", ranks))
        alone = next(p for p in points if (p.system, p.ranks) == ("hot rows, no dedup", ranks))
        rows.append((*row, stock.how, alone.how, hot.how, last.how))
    columns = ("ranks", *systems, "TorchRec's", "no dedup", "hot rows", "2D")
    return Table("", columns, rows).markdown()


def main() -> None:
    if (MEASURED / VALIDATION).is_file():
        stored = json.loads((MEASURED / VALIDATION).read_text())["comparisons"]
        comparisons = [Comparison(**fields) for fields in stored]
        for name, text in validation(comparisons).items():
            write_into(ROOT / "docs" / "predictions.md", name, text)
        draw_validation(FIGURES / "planner_validation.png", comparisons)
    for scenario in SCENARIOS:
        points, cluster = points_of(scenario)
        SCALING.mkdir(parents=True, exist_ok=True)
        kept = {"cluster": cluster, "points": [asdict(point) for point in points]}
        write_json(SCALING / f"{scenario.name}.json", kept)
        write_into(ROOT / "docs" / "scaling.md", scenario.name, scaling(points))
        draw_scaling(FIGURES / f"scaling_{scenario.name}.png", points, cluster)


if __name__ == "__main__":
    main()
