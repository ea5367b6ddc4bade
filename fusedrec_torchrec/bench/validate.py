"""Compares the planner's predictions with measurements: bytes, seconds, the best system.

For each number of ranks and each link of a suite the cluster is calibrated, on shapes that are not
the suite's; then the suite is measured, and every system of every workload is predicted.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from fusedrec_torchrec.access.distinct_bags import BagsByChance
from fusedrec_torchrec.access.row_classes import RowClasses, RowPlaces
from fusedrec_torchrec.bench.figures import WorkloadFigures
from fusedrec_torchrec.bench.hot import HotWorkload
from fusedrec_torchrec.bench.links import hosts, unavailable
from fusedrec_torchrec.bench.plots import COLORS
from fusedrec_torchrec.bench.ranks import environment
from fusedrec_torchrec.bench.results import RESULTS, load_results
from fusedrec_torchrec.bench.run import run_suite
from fusedrec_torchrec.bench.suite import (
    HOT_SYSTEMS,
    PLANNED_SYSTEMS,
    DataName,
    SuiteConfig,
    WorkloadConfig,
    steps_alike,
)
from fusedrec_torchrec.bench.systems import fused_owners
from fusedrec_torchrec.bench.workload import Workload, dims_of, open_source
from fusedrec_torchrec.core.config import from_mapping, load_yaml
from fusedrec_torchrec.core.files import write_json
from fusedrec_torchrec.core.terminal import print_table
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig
from fusedrec_torchrec.planner.cost.step import STOCK, HotUse, Step, fused_step, stock_step
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = [
    "Comparison",
    "Predictor",
    "calibrate_cluster",
    "compare",
    "print_validation",
    "validate",
]

PRICED = (FUSED, *STOCK, *PLANNED_SYSTEMS, "fused_hot", "fused_hot_every_8")
MOST_BYTES_OFF, MOST_SLOWER = 0.02, 0.05
VALIDATION = "validation.json"
Clusters = Mapping[tuple[int, str], ClusterConfig]


@dataclass(frozen=True)
class Comparison:
    """Is a system on a workload, as predicted and as measured.

    Attributes:
        workload, system: what was run.
        ranks, link: where.
        bytes_predicted, bytes_measured: sent by all ranks in a step.
        seconds_predicted, seconds_measured: of a step.
    """

    workload: str
    system: str
    ranks: int
    link: str
    bytes_predicted: float
    bytes_measured: float
    seconds_predicted: float
    seconds_measured: float

    @property
    def bytes_off(self) -> float:
        """Relative error of the predicted bytes."""
        return self.bytes_predicted / self.bytes_measured - 1 if self.bytes_measured else 0.0

    @property
    def seconds_off(self) -> float:
        """Relative error of the predicted seconds."""
        return self.seconds_predicted / self.seconds_measured - 1


def ranks_and_links(workloads: Sequence[WorkloadConfig]) -> list[tuple[int, str]]:
    """Returns the numbers of ranks and the links of all workloads, each pair once."""
    return list(dict.fromkeys((workload.ranks, workload.link) for workload in workloads))


def cluster_file(folder: Path, ranks: int, link: str) -> Path:
    """Returns the file of a calibrated cluster."""
    return folder / f"cluster_{ranks}_{link or 'loopback'}.yaml"


def calibrate_cluster(folder: Path, ranks: int, link: str, suite: SuiteConfig) -> ClusterConfig:
    """Measures a cluster of emulated hosts, where the benchmark's ranks will be.

    What a link is shaped to does not change what machines can do: rates are those of loopback.
    """
    path = cluster_file(folder, ranks, link)
    if path.is_file():  # of an earlier run, or edited by hand
        return from_mapping(ClusterConfig, load_yaml(path), str(path))
    name = f"{ranks} ranks, {link or 'loopback'}"
    command = [sys.executable, "-m", "fusedrec_torchrec.planner.calibrate.measure", "--quiet"]
    if link:
        calibrate_cluster(folder, ranks, "", suite)
        command += ["--rates-of", str(cluster_file(folder, ranks, ""))]
    with tempfile.TemporaryDirectory() as scratch, hosts(ranks, link) as places:
        command += ["--store", f"{scratch}/store", "--output", str(path), "--name", name]
        log = Path(scratch) / "errors"
        with log.open("w") as errors:
            processes = [
                subprocess.Popen(
                    [*host.prefix, *command],
                    env=environment(rank, ranks, suite.threads, host.interface),
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
                for rank, host in enumerate(places)
            ]
            try:
                codes = [process.wait() for process in processes]
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
        if any(codes):
            raise RuntimeError(f"calibration of {name} failed:\n{log.read_text()[-2000:]}")
    return from_mapping(ClusterConfig, load_yaml(path), str(path))


class Predictor:
    """Predicts steps of workloads with the cost model.

    Args:
        prepared: folder of prepared Criteo data, if there is one.
    """

    def __init__(self, prepared: str | None) -> None:
        self._prepared = prepared
        self._counted: dict[str, HotWorkload] = {}

    def _hot(self, config: WorkloadConfig) -> HotWorkload:
        """Returns the access profile of the workload's data, which is counted once."""
        data = "criteo" if config.data == "criteo" else config.name
        key = f"{data} {config.multi_hot} {config.hot_rows}"
        if key not in self._counted:
            self._counted[key] = HotWorkload(config, open_source(config, self._prepared))
        return self._counted[key]

    def tables(self, config: WorkloadConfig, counted: bool = False) -> list[TableLoad]:
        """Returns what a workload asks of its tables: by its law, or as its data was counted.

        A law does not know which bags repeat.
        """
        pooled = config.module == "ebc"
        if config.data == "zipf" and config.bags == "fresh" and not counted:
            law = RowClasses.uniform(config.rows)
            if config.zipf:
                law = RowClasses.zipf(config.rows, config.zipf)
            bags = BagsByChance(law, config.pooling, scattered=True)
            return [
                TableLoad(
                    f"table_{i}", config.rows, dim, config.pooling, law, pooled=pooled, bag_use=bags
                )
                for i, dim in enumerate(dims_of(config, config.tables))
            ]
        profile = self._hot(config).profile
        rows = profile.table_rows
        tables = []
        for (name, count), dim in zip(rows.items(), dims_of(config, len(rows)), strict=True):
            accesses = profile.accesses[name]
            pooling = accesses / profile.samples
            ids = config.batch_size * pooling
            classes = RowClasses.counted(profile, name).drawn_once(ids, accesses)
            places = RowPlaces.counted(profile, name).drawn_once(ids, accesses)
            tables.append(
                TableLoad(
                    name,
                    count,
                    dim,
                    pooling,
                    classes,
                    pooled=pooled,
                    places=places,
                    bag_use=profile.bags.get(name),
                )
            )
        return tables

    def _owners(self, system: str, config: WorkloadConfig) -> list[tuple[int, ...]] | None:
        """Returns who pools each table, as the benchmark's first rank plans it."""
        source = open_source(config, self._prepared)
        return fused_owners(system, Workload.make(config, source, rank=0))

    def step(self, system: str, config: WorkloadConfig) -> Step | None:
        """Predicts a step of a system; None if its plan has fused and stock tables."""
        # Which rows are hot was counted; a law does not know the luck of these rows.
        tables = self.tables(config, counted=system in HOT_SYSTEMS)
        batch, ranks = config.batch_size, config.ranks
        if system == "table_wise":  # to the ranks in turn, as the benchmark places them
            return stock_step(system, tables, batch, ranks, [t % ranks for t in range(len(tables))])
        if system in STOCK:
            return stock_step(system, tables, batch, ranks)
        hot = owners = None
        if system in PLANNED_SYSTEMS:
            owners = self._owners(system, config)
            if owners is None:
                return None
        if system in HOT_SYSTEMS:
            ids = self._hot(config).hot_set().ids
            by_table = [ids[table.name] for table in tables]
            hot = HotUse(np.array([len(rows) for rows in by_table]), steps_alike(system), by_table)
        return fused_step(tables, batch, ranks, hot=hot, owners=owners)


def compare(
    results: Sequence[dict[str, Any]], clusters: Clusters, prepared: str | None
) -> Iterator[Comparison]:
    """Yields a comparison for each measured system that the cost model has a price for."""
    predictor = Predictor(prepared)
    for result in results:
        workload = WorkloadFigures(result)
        config = workload.config
        for name, figures in workload.systems.items():
            if name not in PRICED:
                continue
            step = predictor.step(name, config)
            if step is None:
                continue
            yield Comparison(
                workload=workload.title,
                system=name,
                ranks=config.ranks,
                link=config.link,
                bytes_predicted=step.bytes_sent,
                bytes_measured=figures.bytes_sent,
                seconds_predicted=step.seconds(clusters[config.ranks, config.link]),
                seconds_measured=figures.milliseconds / 1e3,
            )


def best_systems(comparisons: Sequence[Comparison]) -> dict[str, tuple[str, str, float]]:
    """Returns by workload the predicted and the measured best, and how much slower the first is."""
    best = {}
    for name in dict.fromkeys(c.workload for c in comparisons):
        systems = [c for c in comparisons if c.workload == name]
        predicted = min(systems, key=lambda c: c.seconds_predicted)
        measured = min(systems, key=lambda c: c.seconds_measured)
        slower = predicted.seconds_measured / measured.seconds_measured - 1
        best[name] = (predicted.system, measured.system, slower)
    return best


def print_validation(comparisons: Sequence[Comparison]) -> None:
    """Prints a line for each system of each workload, and what all of them say."""
    print_table(
        "predicted and measured",
        (
            *("workload", "system", "KiB", "predicted", "off by"),
            *("ms", "predicted ms", "off by"),
        ),
        [
            (
                c.workload,
                c.system,
                f"{c.bytes_measured / 1024:.1f}",
                f"{c.bytes_predicted / 1024:.1f}",
                f"{c.bytes_off:+.1%}",
                f"{1e3 * c.seconds_measured:.2f}",
                f"{1e3 * c.seconds_predicted:.2f}",
                f"{c.seconds_off:+.0%}",
            )
            for c in comparisons
        ],
    )
    best = best_systems(comparisons)
    print_table(
        "the best system",
        ("workload", "predicted", "measured", "predicted one is slower by"),
        [(name, *names, f"{slower:.1%}") for name, (*names, slower) in best.items()],
    )
    print("\n".join(verdict(comparisons)))


def verdict(comparisons: Sequence[Comparison]) -> list[str]:
    """Returns what all comparisons say, in a few lines."""
    bytes_off = [abs(c.bytes_off) for c in comparisons]
    seconds_off = [abs(c.seconds_off) for c in comparisons]
    best = best_systems(comparisons)
    right = sum(slower <= MOST_SLOWER for _, _, slower in best.values())
    within = sum(off <= MOST_BYTES_OFF for off in bytes_off)
    return [
        f"bytes: {within} of {len(bytes_off)} within {MOST_BYTES_OFF:.0%}, largest error "
        f"{max(bytes_off):.1%}",
        f"seconds: median error {np.median(seconds_off):.1%}, largest {max(seconds_off):.0%}, over "
        f"{len(best)} configurations",
        f"best system: within {MOST_SLOWER:.0%} of the measured best in {right} of {len(best)}",
    ]


def compare_again(folder: Path, prepared: str | None) -> list[Comparison]:
    """Compares this cost model's predictions with what an earlier run has measured.

    Raises:
        ValueError: the folder has no such figures.
    """
    results = load_results(folder / RESULTS)["results"]
    clusters: dict[tuple[int, str], ClusterConfig] = {}
    for result in results:
        place = (result["workload"]["ranks"], result["workload"]["link"])
        path = cluster_file(folder, *place)
        clusters[place] = from_mapping(ClusterConfig, load_yaml(path), str(path))
    return list(compare(results, clusters, prepared))


def validate(
    suite: SuiteConfig, prepared: str | None, folder: Path, only: str | None, progress: bool
) -> list[Comparison]:
    """Calibrates, measures and compares; the figures stay in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    workloads = suite.chosen(only)
    clusters: dict[tuple[int, str], ClusterConfig] = {}
    places = [place for place in ranks_and_links(workloads) if unavailable(place[1]) is None]
    for ranks, link in tqdm(places, disable=not progress, file=sys.stderr, unit="cluster"):
        clusters[ranks, link] = calibrate_cluster(folder, ranks, link, suite)
    data: dict[DataName, str] = {} if prepared is None else {"criteo": prepared}
    document = run_suite(suite, data, folder, only, progress)
    comparisons = list(compare(document["results"], clusters, prepared))
    write_json(folder / VALIDATION, {"comparisons": [asdict(c) for c in comparisons]})
    draw_validation(folder / "predicted.png", comparisons)
    return comparisons


def draw_validation(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Draws predicted over measured step times."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 5.5), layout="constrained")
    axis = figure.subplots()
    for system in dict.fromkeys(c.system for c in comparisons):
        workloads = [c for c in comparisons if c.system == system]
        axis.scatter(
            [1e3 * c.seconds_measured for c in workloads],
            [1e3 * c.seconds_predicted for c in workloads],
            s=22,
            color=COLORS[system],
            label=system,
        )
    ends = [1e3 * f(c.seconds_measured for c in comparisons) for f in (min, max)]
    for factor, style in ((1.0, "-"), (1.15, ":"), (1 / 1.15, ":")):
        axis.plot(ends, [factor * end for end in ends], style, color="#9aa0a6", linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms")
    axis.set_title("training steps, and 15 % more and less")
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
