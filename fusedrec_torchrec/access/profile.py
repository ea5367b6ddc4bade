"""How the rows of the tables are accessed: what decides whether dedup and hot rows pay.

P2RES (PPoPP 2024) and FAE (VLDB 2022) both start from this picture: a few rows take most accesses.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from fusedrec_torchrec.access.access_profile import AccessProfile
from fusedrec_torchrec.access.bag_counts import bag_keys, distinct_bags
from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.recorder import Recorder
from fusedrec_torchrec.access.samples import Source, ids_by_table

__all__ = [
    "Accesses",
    "TableAccess",
    "covered_by",
    "draw_coverage",
    "profile",
    "sample_profile",
]

SAMPLED_BLOCK = 256


@dataclass
class TableAccess:
    """Holds the accesses to one table.

    Attributes:
        name: of the table.
        counts: accesses of each row.
        distinct_in_batches: sum over batches of the distinct ids of each.
        bags_in_batches: sum over batches of the bags of each that are not empty.
        distinct_bags_in_batches: sum over batches of the distinct ones among them.
        ids_of_distinct_bags: sum over batches of the ids in distinct bags.
    """

    name: str
    counts: NDArray[np.int64]
    distinct_in_batches: int = 0
    bags_in_batches: int = 0
    distinct_bags_in_batches: int = 0
    ids_of_distinct_bags: int = 0

    def add_batch(self, ids: NDArray[np.int64], lengths: NDArray[np.int64], whole: bool) -> None:
        """Counts the bags of a batch; distinct ones only of a whole batch."""
        rows, counts = np.unique(ids, return_counts=True)
        self.counts[rows] += counts
        if not whole:
            return
        keys, full = bag_keys(ids, lengths)
        bags = distinct_bags(keys, full)
        self.distinct_in_batches += len(rows)
        self.bags_in_batches += len(full)
        self.distinct_bags_in_batches += int(bags.bags)
        self.ids_of_distinct_bags += int(bags.ids)

    @property
    def rows(self) -> int:
        """How many rows the table has."""
        return len(self.counts)

    @property
    def accesses(self) -> int:
        """How often its rows were accessed."""
        return int(self.counts.sum())

    @property
    def rows_used(self) -> int:
        """How many of its rows were accessed."""
        return int(np.count_nonzero(self.counts))

    def top(self, n: int) -> list[tuple[int, int]]:
        """Returns the n most used rows and their accesses."""
        order = np.argsort(-self.counts, kind="stable")[:n]
        return [(int(row), int(self.counts[row])) for row in order if self.counts[row]]


@dataclass
class Accesses:
    """Holds the accesses to all tables, counted row by row.

    Attributes:
        tables: one for each table.
        batch_size: samples of a batch.
        batches: how many were seen.
        samples: how many were seen, those of the last, incomplete batch included.
    """

    tables: list[TableAccess]
    batch_size: int
    batches: int = 0
    samples: int = 0

    def all_counts(self) -> NDArray[np.int64]:
        """Returns the accesses of all used rows of all tables."""
        counts = np.concatenate([table.counts for table in self.tables])
        return counts[counts > 0]


def coverage(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the share of the accesses that the 1, 2, 3, … most used rows take."""
    used = np.sort(counts[counts > 0])[::-1]
    return np.cumsum(used) / max(int(used.sum()), 1)


def share_of_top(counts: NDArray[np.int64], share: float) -> float:
    """Returns the share of the accesses that a share of the used rows takes, at least one row."""
    covered = coverage(counts)
    if len(covered) == 0:
        return 0.0
    return float(covered[max(round(len(covered) * share), 1) - 1])


def rows_for(counts: NDArray[np.int64], share: float) -> int:
    """Returns the least number of rows that take the given share of the accesses."""
    covered = coverage(counts)
    if len(covered) == 0:
        return 0
    return int(np.searchsorted(covered, share - 1e-12)) + 1


def profile(
    source: Source, batch_size: int, samples: int | None = None, progress: bool = True
) -> Accesses:
    """Counts the accesses of the first ``samples`` samples, in their order.

    Raises:
        ValueError: ``batch_size`` or ``samples`` out of range.
    """
    total = source.samples if samples is None else min(samples, source.samples)
    if total < 1:
        raise ValueError(f"samples is {samples}, must be at least 1")
    if not 1 <= batch_size <= total:
        raise ValueError(f"batch size is {batch_size}, must be in [1, {total}], the samples")
    tables = [
        TableAccess(name, np.zeros(rows, dtype=np.int64))
        for name, rows in source.table_rows.items()
    ]
    result = Accesses(tables, batch_size)
    with tqdm(total=total, unit="sample", unit_scale=True, disable=not progress) as bar:
        for start in range(0, total, batch_size):
            batch = source.read(start, min(start + batch_size, total))
            whole = len(batch) == batch_size
            of_tables = ids_by_table(batch, source.features)
            for table in tables:
                table.add_batch(*of_tables[table.name], whole)
            result.batches += whole
            result.samples += len(batch)
            bar.update(len(batch))
    return result


def sample_profile(
    source: Source, share: float, counters: int, progress: bool = True
) -> AccessProfile:
    """Returns FAE's profile: accesses of some samples, in blocks spread evenly over the data.

    Args:
        source: the data.
        share: of the samples to count.
        counters: rows to count at a time, which bounds memory and file.
        progress: whether to show a bar.

    Raises:
        ValueError: ``share`` or ``counters`` out of range.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share of samples is {share}, must be in (0, 1]")
    recorder = Recorder(source.table_rows, counters)
    blocks = -(-source.samples // SAMPLED_BLOCK)
    chosen = np.unique((np.arange(max(round(blocks * share), 1)) / share).astype(int))
    for block in tqdm(chosen[chosen < blocks], desc="sampling", disable=not progress):
        start = int(block) * SAMPLED_BLOCK
        samples = source.read(start, min(start + SAMPLED_BLOCK, source.samples))
        of_tables = ids_by_table(samples, source.features)
        ids, lengths = zip(*(of_tables[name] for name in source.table_rows), strict=True)
        recorder.add(ids, len(samples), None if samples.lengths is None else lengths)
    return recorder.profile(source.samples)


def covered_by(hot_set: HotSet, accesses: Accesses) -> float:
    """Returns the share of the accesses that go to hot rows."""
    covered = sum(int(t.counts[hot_set.ids[t.name]].sum()) for t in accesses.tables)
    return covered / max(sum(table.accesses for table in accesses.tables), 1)


def draw_coverage(result: Accesses, path: Path, sampled: AccessProfile | None = None) -> None:
    """Draws the share of accesses over the share of the most used rows (P2RES, figure 2).

    With a sampled profile also what the rows take that it thinks are most used.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for table in sorted(result.tables, key=lambda table: -table.rows_used)[:12]:
        _draw(axes, table.counts, color="tab:blue", alpha=0.25, linewidth=1)
    _draw(axes, result.all_counts(), color="tab:red", linewidth=2, label="all tables together")
    axes.plot([], [], color="tab:blue", alpha=0.4, label="the largest tables, one by one")
    if sampled is not None:
        used = len(result.all_counts())
        sizes = np.unique(np.geomspace(1, HotSet.most_used(sampled, used).rows, 60).astype(int))
        shares = [covered_by(HotSet.most_used(sampled, int(size)), result) for size in sizes]
        axes.plot(
            100 * sizes / used, 100 * np.array(shares), "k--", linewidth=1.5,
            label=f"picked by {sampled.samples / result.samples:.0%} of the samples",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel("most used rows, % of all rows used")
    axes.set_ylabel("accesses they take, %")
    axes.set_ylim(0, 101)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def _draw(axes: object, counts: NDArray[np.int64], **style: object) -> None:
    covered = coverage(counts)
    if len(covered) == 0:
        return
    places = np.unique(np.geomspace(1, len(covered), 300).astype(int)) - 1
    axes.plot(100 * (places + 1) / len(covered), 100 * covered[places], **style)  # type: ignore[attr-defined]
