"""P2RES (PPoPP 2024): items that nearly every batch contains, and what replicating them gains.

Figure 2 of the paper, as it says: of 100 batches, in how many is each item?  And of one batch more,
which accesses go to items of each frequency?  An item is a row of a table.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from paper_results import NOTHING, Results, side_by_side

from fusedrec_torchrec.bench.figures import WorkloadFigures
from fusedrec_torchrec.bench.report import Table
from fusedrec_torchrec.training.data.prepared import PreparedData

__all__ = ["draw", "measure", "tables"]

BATCHES = 100
FREQUENT = 95  # batches that contain an item which the paper calls frequent
PARTS = (1, 2, 4)  # of the largest batch that the data has 101 of
PAPER = {"Criteo": (0.022, 0.90), "Taobao": (0.13, 0.86)}  # items, accesses that they take


def count_frequencies(ids_FN: NDArray[np.int64], batch: int) -> dict[str, list[int]]:
    """Counts items by the number of batches that contain them, 0 to 100.

    Args:
        ids_FN: the row that each sample has of each table.
        batch: samples of a batch.

    Returns:
        ``items`` that so many batches contain; ``accesses`` of one batch more to them; how many
        ``others`` of its items so many batches contain.
    """
    counts = {name: np.zeros(BATCHES + 1, np.int64) for name in ("items", "accesses", "others")}
    for ids_N in ids_FN:
        in_batches = np.zeros(int(ids_N.max()) + 1, np.int64)
        for start in range(0, BATCHES * batch, batch):
            in_batches[np.unique(ids_N[start : start + batch])] += 1
        counts["items"] += np.bincount(in_batches[in_batches > 0], minlength=BATCHES + 1)
        more = ids_N[BATCHES * batch : (BATCHES + 1) * batch]
        counts["accesses"] += np.bincount(in_batches[more], minlength=BATCHES + 1)
        counts["others"] += np.bincount(in_batches[np.unique(more)], minlength=BATCHES + 1)
    return {name: values.tolist() for name, values in counts.items()}


def measure(data: Mapping[str, PreparedData]) -> dict[str, Any]:
    """Counts frequencies in both data sets, with batches of several sizes."""
    result: dict[str, Any] = {}
    for name, source in data.items():
        samples = source.read(0, source.samples)
        ids_FN = samples.ids.reshape(len(source.table_rows), -1)
        # Batches are drawn from all of the data, as if a loader had shuffled it.
        ids_FN = ids_FN[:, np.random.default_rng(0).permutation(ids_FN.shape[1])]
        largest = ids_FN.shape[1] // (BATCHES + 1)
        result[name] = {
            "features": list(source.table_rows),
            "samples": source.samples,
            "batches": {
                str(size): count_frequencies(ids_FN, size) for size in (largest // p for p in PARTS)
            },
        }
    return result


class Frequencies:
    """Says what counts by frequency mean.

    Attributes:
        items: share of the items in at least k of the batches, [k].
        accesses: share of another batch's accesses that they take, [k].
    """

    def __init__(self, counts: Mapping[str, list[int]]) -> None:
        items, accesses = (
            np.cumsum(np.array(counts[name])[::-1])[::-1] for name in ("items", "accesses")
        )
        self.seen = int(items[1])
        self.items = items / items[1]
        self.accesses = accesses / accesses[0]
        self.new_accesses = counts["accesses"][0] / sum(counts["accesses"])
        self.new_items = counts["others"][0] / sum(counts["others"])

    def covered_by(self, share: float) -> float:
        """Returns the share of accesses that so large a share of the items takes, the best first.

        Between two frequencies it is as if their items were mixed evenly.
        """
        return float(np.interp(share, self.items[:0:-1], self.accesses[:0:-1]))


def figure_2(stored: Mapping[str, Any]) -> str:
    """Returns figure 2 as a table."""
    rows: list[tuple[str, ...]] = []
    for name, found in stored.items():
        share, accesses = PAPER[name]
        frequent = "2.2 %" if name == "Criteo" else NOTHING
        rows.append(
            (
                f"{name}, the paper",
                NOTHING,
                frequent,
                NOTHING,
                f"{share:.1%}: {accesses:.0%}",
                "< 1 %",
            )
        )
        for size, counts in found["batches"].items():
            f = Frequencies(counts)
            rows.append(
                (
                    f"{name}, batches of {size}",
                    f"{f.seen:,}",
                    f"{f.items[FREQUENT + 1]:.2%}",
                    f"{f.accesses[FREQUENT + 1]:.1%}",
                    f"{share:.1%}: {f.covered_by(share):.1%}",
                    f"{f.new_items:.1%} ({f.new_accesses:.1%} of accesses)",
                )
            )
    columns = (
        "",
        "items in 100 batches",
        f"of them in more than {FREQUENT}",
        "accesses of another batch to these",
        "the most frequent share of the items: accesses it takes",
        "items of another batch not among the 100",
    )
    return Table("", columns, rows).markdown()


def _speeds(workloads: list[WorkloadFigures]) -> str:
    names = list(dict.fromkeys(name for w in workloads for name in w.systems))
    rows = []
    for w in workloads:
        assert w.best_stock is not None
        hot = w.systems["fused_hot"]
        rows.append(
            (
                w.title,
                *(f"{w.systems[n].milliseconds:.1f}" if n in w.systems else "" for n in names),
                w.best_stock.name,
                str(w.speed_up),
                str(w.speed_up_of("fused_hot")),
                str(hot.against_fused),
            )
        )
    columns = (
        "milliseconds of a step",
        *names,
        "TorchRec's best",
        "it / fused",
        "it / fused with hot rows",
        "with hot rows / without",
    )
    return Table("", columns, rows).markdown()


def _medians(workloads: list[WorkloadFigures], system: str) -> str:
    """Returns the median on each link."""
    ratios = {w.config.link or "loopback": w.speed_up_of(system) for w in workloads}
    return "; ".join(f"{link} {r.median:.2f}x" for link, r in ratios.items() if r is not None)


def _simulated(results: Results, system: str) -> str:
    texts = []
    for ranks in (4, 32):
        torchrec, ours = (results.point("hot", s, ranks) for s in ("TorchRec", system))
        if torchrec is None or ours is None:
            return NOTHING
        texts.append(f"{ours.throughput / torchrec.throughput:.2f}x on {ranks} GPUs")
    return ", ".join(texts)


def tables(results: Results) -> dict[str, str]:
    """Returns the tables of the section, by marker."""
    stored = results.of("p2res")
    made: dict[str, str] = {}
    rows: list[tuple[str, str, str, str]] = []
    if stored is not None:
        made["figure 2"] = figure_2(stored)
        for name, (share, accesses) in PAPER.items():
            size, counts = next(iter(stored[name]["batches"].items()))
            covered = Frequencies(counts).covered_by(share)
            rows.append(
                (
                    f"{name}: accesses to the {share:.1%} of the items that most batches have",
                    f"{accesses:.0%}",
                    f"{covered:.1%}, batches of {size}",
                    NOTHING,
                )
            )
    both = [w for n in ("Criteo", "Taobao") for w in results.workloads(f"P2RES, {n}")]
    if both:
        made["p2res speed"] = _speeds(both)
    for text, system, simulated in (
        ("replicated items, no dedup, as P2RES", None, "hot rows, no dedup"),
        ("the fused exchange", "fused_row_wise", "fused"),
        ("the fused exchange with hot rows", "fused_hot", "fused + hot rows"),
    ):
        paper = "2.16 to 16.8x over all baselines, 32 GPUs" if system is None else NOTHING
        for name in ("Criteo", "Taobao"):
            own = [w for w in both if w.config.series == f"P2RES, {name}"]
            measured = _medians(own, system) if system is not None and own else NOTHING
            shown = _simulated(results, simulated) if name == "Criteo" else NOTHING
            if measured or shown:
                rows.append((f"{name}: TorchRec's best step / {text}", paper, measured, shown))
    if rows:
        made["p2res side by side"] = side_by_side(rows)
    return made


def draw(results: Results, path: Path) -> bool:
    """Draws figure 2: bars of items, and coverage of another batch; returns if there is any."""
    stored = results.of("p2res")
    if stored is None:
        return False
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for axes, (name, found) in zip(both, stored.items(), strict=True):
        size, counts = next(iter(found["batches"].items()))
        f = Frequencies(counts)
        items = 100 * np.array(counts["items"]) / f.seen
        bins = np.arange(BATCHES, 0, -5)  # the last of five frequencies
        heights = [items[last - 4 : last + 1].sum() for last in bins]
        axes.bar(-bins + 2, heights, width=4.6, color="lightsteelblue", label="items, left axis")
        axes.set_yscale("log")
        axes.set_ylim(0.005, 200)
        coverage = axes.twinx()
        frequencies = np.arange(BATCHES, -1, -1)
        coverage.plot(
            -frequencies,
            100 * f.accesses[frequencies],
            color="tab:red",
            label="accesses of another batch to items of this frequency or more, right axis",
        )
        coverage.set_ylim(0, 100)
        coverage.grid(alpha=0.3)
        axes.set_xticks(-np.arange(100, -1, -20), [str(k) for k in range(100, -1, -20)])
        axes.set_xlabel(f"in how many of 100 batches of {size} samples")
        axes.set_title(name)
    both[0].set_ylabel("% of the items")
    coverage.set_ylabel("% of the accesses")
    handles = [*both[1].containers, *coverage.lines]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
