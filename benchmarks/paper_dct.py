"""DCT (KDD 2021): quality against how often thresholds are renewed and how much travels.

The same model is trained on Criteo data from the same weights, for several seeds; what differs is
which entries of gradients travel between ranks (data parallel), or which entries of rows (model
parallel).  Batches are small, so that there are many steps: an epoch of the sample has 918, so
that thresholds which are renewed every thousand steps are those of the first.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from compression_quality import dct, dense, trained
from paper_results import NOTHING, Results, side_by_side
from ranks import on_ranks, one_by_one

from fusedrec_torchrec.bench.report import Table
from fusedrec_torchrec.training.data.prepare import prepare
from fusedrec_torchrec.training.data.prepare_options import PrepareOptions

__all__ = ["draw", "measure", "tables"]

RANKS = 2
BATCH = 128
MODEL = [
    "model.dense_arch=[256,64,16]",
    "model.over_arch=[256,1]",
    "data.eval_batch_size=4096",
]
PLAIN = "fp32"
FIGURE = "![AUC over interval and density](figures/papers_dct.png)"
DENSITY = 0.009  # a hundredth of the bytes of an all-reduce between two ranks
EVERY = (10, 100, 1000)
DENSITIES = (0.03, 0.003)
ROWS_EVERY = (10, 1000)
ROWS_DENSITY = 0.05


def _dense(density: float, every: int) -> str:
    return f"gradients {density}, every {every}"


def _rows(every: int) -> str:
    return f"rows {ROWS_DENSITY}, every {every}"


SYSTEMS: dict[str, list[str]] = {
    PLAIN: [],
    **{_dense(DENSITY, every): dense(DENSITY, f", every: {every}") for every in EVERY},
    **{_dense(density, 10): dense(density) for density in DENSITIES},
    **{
        _rows(every): [
            line.replace("relative:", f"every: {every}, relative:") for line in dct(0.05)
        ]
        for every in ROWS_EVERY
    },
}

Run = tuple[str, int]  # system, seed


def train(folder: Path, run: Run, epochs: int) -> dict[str, float]:
    """Trains one run on this rank."""
    system, seed = run
    return trained(folder, [*MODEL, *SYSTEMS[system]], seed, epochs, BATCH)


def measure(data: str, seeds: int, epochs: int) -> dict[str, Any]:
    """Trains all systems with all seeds; returns their evaluations and bytes.

    Raises:
        ValueError: the data cannot be read, or there are too few seeds for a spread.
    """
    if seeds < 2:
        raise ValueError(f"--seeds is {seeds}, must be at least 2, for a spread")
    runs: list[Run] = [(system, seed) for seed in range(seeds) for system in SYSTEMS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = PrepareOptions(min_count=3, on_bad_line="skip")
        prepare([data], folder / "prepared", options)
        values = on_ranks(RANKS, one_by_one, train, folder, runs, epochs)
    results: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
    for (system, _), value in zip(runs, values, strict=True):
        results[system].append(value)
    return {"batch": BATCH, "systems": results}


def _sent(system: str, runs: Sequence[Mapping[str, float]]) -> float:
    """Returns the bytes of a step of what is compressed."""
    run = runs[0]
    if system.startswith("rows"):
        return run["all_to_all"]
    return run["all_reduce"] + run["all_gather"]


def _fewer(stored: Mapping[str, Any], system: str) -> float:
    systems = stored["systems"]
    of_rows = "rows" if system.startswith("rows") else "gradients"
    return _sent(of_rows, systems[PLAIN]) / _sent(system, systems[system])


def _apart(stored: Mapping[str, Any], system: str) -> list[float]:
    systems = stored["systems"]
    pairs = zip(systems[system], systems[PLAIN], strict=True)
    return [run["auc"] - plain["auc"] for run, plain in pairs]


def _margin(values: Sequence[float]) -> float:
    """Returns the half width of the interval that holds the mean with about 95 %."""
    return 2 * stdev(values) / len(values) ** 0.5


def _quality(stored: Mapping[str, Any]) -> str:
    rows: list[tuple[str, ...]] = []
    for system, runs in stored["systems"].items():
        auc, loss = ([run[name] for run in runs] for name in ("auc", "log_loss"))
        apart = _apart(stored, system)
        rows.append(
            (
                system,
                "" if system == PLAIN else f"{_fewer(stored, system):.1f}x",
                f"{mean(auc):.5f} ± {stdev(auc):.5f}",
                f"{mean(loss):.5f} ± {stdev(loss):.5f}",
                "" if system == PLAIN else f"{mean(apart):+.5f} ± {_margin(apart):.5f}",
            )
        )
    columns = ("", "fewer bytes", "AUC", "log loss", "AUC, mean difference (95 %)")
    plain = stored["systems"][PLAIN]
    about = (
        f"{len(plain)} seeds, {plain[0]['steps']:.0f} steps of {stored['batch']} samples; mean ± "
        "standard deviation over the seeds, and the mean difference to `fp32` with the same seed."
    )
    return f"{about}\n\n{Table('', columns, rows).markdown()}\n\n{FIGURE}"


def tables(results: Results) -> dict[str, str]:
    """Returns the tables of the section, by marker."""
    stored = results.of("dct")
    if stored is None:
        return {}

    def told(system: str) -> str:
        apart = _apart(stored, system)
        fewer, auc = _fewer(stored, system), f"{mean(apart):+.4f} ± {_margin(apart):.4f}"
        return f"{fewer:.0f}x fewer bytes, AUC {auc}"

    rows = [
        (
            f"data parallel: traffic and quality, density {DENSITY}",
            "100x and more, no loss",
            f"every {every} steps: {told(_dense(DENSITY, every))}",
            NOTHING,
        )
        for every in (EVERY[0], EVERY[-1])
    ]
    rows.append(
        (
            f"model parallel: traffic and quality, density {ROWS_DENSITY}",
            "20x and more, no loss",
            f"{told(_rows(ROWS_EVERY[-1]))} (16 columns, bytes of ids included)",
            NOTHING,
        )
    )
    rows.append(("end to end", "37 % less time", NOTHING, NOTHING))
    return {"dct quality": _quality(stored), "dct side by side": side_by_side(rows)}


def draw(results: Results, path: Path) -> bool:
    """Draws AUC over the interval and over the density; returns whether there is any."""
    stored = results.of("dct")
    if stored is None:
        return False
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(9, 3.8), layout="constrained", sharey=True
    )
    densities = sorted((DENSITY, *DENSITIES))
    for axes, sizes, systems, label in (
        (left, EVERY, [_dense(DENSITY, e) for e in EVERY], "steps from one renewal to the next"),
        (right, densities, [_dense(d, 10) for d in densities], "density"),
    ):
        apart = [_apart(stored, system) for system in systems]
        axes.errorbar(
            sizes,
            [mean(values) for values in apart],
            yerr=[_margin(values) for values in apart],
            marker="o",
            capsize=3,
            color="tab:blue",
        )
        for size, values in zip(sizes, apart, strict=True):
            axes.plot([size] * len(values), values, ".", color="0.6", zorder=0)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    left.set_ylabel("AUC, difference to fp32 (grey: single seeds)")
    left.set_title(f"density {DENSITY}", fontsize="medium")
    right.set_title("renewed every 10 steps", fontsize="medium")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
