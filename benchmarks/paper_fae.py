"""FAE (VLDB 2022): how skewed accesses are, and what hot rows on the device save.

Bytes between host and device are counted on the batches of one epoch.  Nothing is copied: there is
no GPU here.  All ways of training have tables of 64 columns in host memory, in fp32; what a step
needs goes to the device, and as many bytes of gradients come back.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from paper_results import NOTHING, Results, side_by_side

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.profile import sample_profile
from fusedrec_torchrec.bench.figures import WorkloadFigures
from fusedrec_torchrec.bench.report import Table
from fusedrec_torchrec.core.terminal import human_bytes
from fusedrec_torchrec.planner.cost.cluster import GB, ClusterConfig
from fusedrec_torchrec.training.data.prepared import PreparedData

__all__ = ["draw", "measure", "tables"]

DIM = 64
ROW_BYTES = 4 * DIM + 4  # with the state of row-wise AdaGrad
SAMPLED = 0.05  # of the inputs, as in the paper
COUNTERS = 1 << 21
SIZES = (100, 300, 1000, 3000, 10_000, 20_000, 50_000, 100_000, 200_000)
BATCH = 1024
HOT_ROWS = 20_000
PHASES = 20  # hot and cold ones of an epoch: a scheduler's rate of 10 %
LARGE = 10_000  # rows of a table that is worth to be called one
WAYS = {
    "embeddings": "an embedding for each id (hybrid of CPU and GPU, no dedup)",
    "distinct": "distinct rows of a batch",
    "fae": "FAE: an embedding for each id in cold batches only, and the hot rows between",
    "hot_rows": "hot rows on the device, distinct cold rows",
    "hot_batches": "the same, with hot and cold batches",
}


def _use(ids_FN: NDArray[np.int64], names: list[str]) -> list[dict[str, Any]]:
    """Returns the accesses to the most and the least used row of each table."""
    found = []
    for name, ids_N in zip(names, ids_FN, strict=True):
        counts = np.bincount(ids_N)
        counts = counts[counts > 0]
        found.append(
            {
                "table": name,
                "rows": len(counts),
                "most": int(counts.max()),
                "least": int(counts.min()),
                "median": float(np.median(counts)),
            }
        )
    return found


def _coverage(data: PreparedData) -> list[dict[str, float]]:
    """Returns what hot sets of all sizes take, picked by a sample and by all inputs."""
    samples = data.read(0, data.samples)
    ids_FN = samples.ids.reshape(len(data.table_rows), -1)
    sampled, whole = (sample_profile(data, s, COUNTERS, progress=False) for s in (SAMPLED, 1.0))
    total = sum(data.table_rows.values())
    found = []
    for size in SIZES:
        if size > total:
            break
        line: dict[str, float] = {"rows": size, "of_rows": size / total}
        for name, profile in (("sampled", sampled), ("best", whole)):
            hot_set = HotSet.most_used(profile, size)
            hits = [
                np.isin(ids_N, hot_set.ids[table]).mean()
                for table, ids_N in zip(data.table_rows, ids_FN, strict=True)
            ]
            line[name] = float(np.mean(hits))
            line[f"{name}_rows"] = hot_set.rows
            line[f"{name}_samples"] = float(hot_set.hot_samples(samples).mean())
        found.append(line)
    return found


def _bytes(data: PreparedData) -> dict[str, Any]:
    """Counts bytes between host and device in an epoch, both ways."""
    ids_FN = data.read(0, data.samples).ids.reshape(len(data.table_rows), -1)
    hot_set = HotSet.most_used(sample_profile(data, SAMPLED, COUNTERS, progress=False), HOT_ROWS)
    is_hot_FN = np.stack(
        [
            np.isin(ids_N, hot_set.ids[table])
            for table, ids_N in zip(data.table_rows, ids_FN, strict=True)
        ]
    )
    order = np.random.default_rng(0).permutation(ids_FN.shape[1])
    all_hot_N = np.asarray(is_hot_FN.all(axis=0))
    cold = order[~all_hot_N[order]]
    rows = dict.fromkeys(WAYS, 0)
    rows["embeddings"] = ids_FN.size
    rows["distinct"] = _distinct(ids_FN, order)
    rows["fae"] = len(cold) * len(ids_FN)
    # Keys of hot rows count as one row that is not there.
    cold_ids_FN = np.where(is_hot_FN, -1, ids_FN)
    rows["hot_rows"] = _distinct(cold_ids_FN, order)
    rows["hot_batches"] = _distinct(cold_ids_FN, cold)
    sent = {way: 2 * 4 * DIM * count for way, count in rows.items()}
    # Hot rows go to the device before a hot phase, and back after it.
    sent["fae"] += PHASES * hot_set.rows * ROW_BYTES
    return {
        "hot_rows": hot_set.rows,
        "tables_bytes": sum(data.table_rows.values()) * ROW_BYTES,
        "hot_samples": float(all_hot_N.mean()),
        "batches": -(-data.samples // BATCH),
        "bytes": sent,
    }


def _distinct(ids_FN: NDArray[np.int64], order: NDArray[np.int64]) -> int:
    """Returns the distinct rows of all batches, tables apart; negative ones are none."""
    total = 0
    for start in range(0, len(order), BATCH):
        batch_FB = ids_FN[:, order[start : start + BATCH]]
        total += sum(int((np.unique(ids_B) >= 0).sum()) for ids_B in batch_FB)
    return total


def measure(data: Mapping[str, PreparedData]) -> dict[str, Any]:
    """Counts use, coverage and bytes of both data sets."""
    result: dict[str, Any] = {}
    for name, source in data.items():
        ids_FN = source.read(0, source.samples).ids.reshape(len(source.table_rows), -1)
        result[name] = {
            "samples": source.samples,
            "use": _use(ids_FN, list(source.table_rows)),
            "coverage": _coverage(source),
            "traffic": _bytes(source),
        }
    return result


def _ratios(stored: Mapping[str, Any]) -> str:
    rows: list[tuple[str, ...]] = []
    for name, found in stored.items():
        tables_of = found["use"]
        large = [t for t in tables_of if t["rows"] >= LARGE] or tables_of
        for title, chosen in (
            ("any table", tables_of),
            (f"tables of {LARGE:,} rows and more", large),
        ):
            top = max(chosen, key=lambda t: t["most"] / t["least"])
            rows.append(
                (
                    f"{name}, {title}",
                    f"{top['table']}, {top['rows']:,} rows",
                    f"{top['most']:,}",
                    f"{top['most'] / top['least']:,.0f}x",
                    f"{top['most'] / top['median']:,.0f}x",
                )
            )
    columns = (
        "",
        "the most skewed",
        "accesses to its most used row",
        "/ least used",
        "/ median row",
    )
    return Table("", columns, rows).markdown()


def _coverage_table(stored: Mapping[str, Any]) -> str:
    rows: list[tuple[str, ...]] = []
    for name, found in stored.items():
        rows += [
            (
                name,
                f"{line['rows']:,.0f} ({line['of_rows']:.2%})",
                human_bytes(line["rows"] * ROW_BYTES),
                f"{line['sampled']:.1%}" + _seen(line),
                f"{line['best']:.1%}",
                f"{line['sampled_samples']:.1%}",
                f"{line['best_samples']:.1%}",
            )
            for line in found["coverage"]
        ]
    columns = (
        "",
        "hot rows",
        "memory",
        "accesses, picked by 5 %",
        "picked by all",
        "hot inputs, picked by 5 %",
        "picked by all",
    )
    return Table("", columns, rows).markdown()


def _seen(line: Mapping[str, float]) -> str:
    """Returns how many rows a hot set really has, if the sample has seen no more."""
    seen = line["sampled_rows"]
    return f" (only {seen:,} rows were seen)" if seen < line["rows"] else ""


def _traffic_table(stored: Mapping[str, Any]) -> str:
    speed = ClusterConfig().host_lookup * GB
    rows: list[tuple[str, ...]] = []
    for name, found in stored.items():
        sent = found["traffic"]["bytes"]
        rows += [
            (
                f"{name}: {text}",
                human_bytes(sent[way] / found["traffic"]["batches"]),
                f"{sent['embeddings'] / max(sent[way], 1):.2f}x",
                f"{1e3 * sent[way] / found['traffic']['batches'] / speed:.2f}",
            )
            for way, text in WAYS.items()
        ]
    columns = ("", "bytes of a batch", "fewer", "ms at 10 GB/s, simulated")
    assert ClusterConfig().host_lookup == 10, "the column says 10 GB/s"
    return Table("", columns, rows).markdown()


def _milliseconds(traffic: Mapping[str, Any], way: str) -> str:
    speed = ClusterConfig().host_lookup * GB
    before, after = (
        1e3 * traffic["bytes"][w] / traffic["batches"] / speed for w in ("embeddings", way)
    )
    return f"{before:.2f} to {after:.2f} ms of a batch"


def _epoch(hot: WorkloadFigures, every: WorkloadFigures, share: float, system: str) -> float:
    """Returns the time of an epoch without hot batches / with, from steps that were measured."""
    step = every.systems["fused_row_wise"].milliseconds
    return step / (share * hot.systems[system].milliseconds + (1 - share) * step)


def _times(results: Results) -> str | None:
    hot = results.workloads("FAE, Criteo, hot batches")
    every = {w.config.link: w for w in results.workloads("P2RES, Criteo")}
    stored = results.of("fae")
    if not hot or not every or stored is None:
        return None
    share = stored["Criteo"]["traffic"]["hot_samples"]
    rows: list[tuple[str, ...]] = []
    for w in hot:
        all_batches = every[w.config.link]
        step = all_batches.systems["fused_row_wise"]
        for name, system in w.systems.items():
            epoch = "" if name == "table_wise" else f"{_epoch(w, all_batches, share, name):.2f}x"
            rows.append(
                (
                    w.config.link or "loopback",
                    name,
                    f"{system.milliseconds:.1f}",
                    str(system.against_fused),
                    human_bytes(system.bytes_sent),
                    f"{step.milliseconds:.1f}" if name == "fused_row_wise" else "",
                    epoch,
                )
            )
    columns = (
        "link",
        "hot batches with",
        "ms of a step",
        "/ fused_row_wise",
        "bytes of a step, all ranks",
        "fused_row_wise, any batch, ms",
        f"epoch, {share:.1%} of the inputs hot: times as fast, computed",
    )
    return Table("", columns, rows).markdown()


def tables(results: Results) -> dict[str, str]:
    """Returns the tables of the section, by marker."""
    stored = results.of("fae")
    if stored is None:
        return {}
    made = {
        "fae ratio": _ratios(stored),
        "fae coverage": _coverage_table(stored),
        "fae bytes": _traffic_table(stored),
    }
    times = _times(results)
    if times is not None:
        made["fae time"] = times
    tops = {
        name: max(found["use"], key=lambda t: t["most"] / t["least"])
        for name, found in stored.items()
    }
    ratios = ", ".join(f"{name} {t['most'] / t['least']:,.0f}x" for name, t in tops.items())
    criteo = stored["Criteo"]["traffic"]
    sent = criteo["bytes"]
    rows = [
        ("most / least used row", "up to 10,000x", ratios, NOTHING),
        (
            "hot rows, memory: inputs that need no others (Criteo)",
            "256 MB",
            f"{criteo['hot_rows']:,} rows, {human_bytes(criteo['hot_rows'] * ROW_BYTES)} of "
            f"{human_bytes(criteo['tables_bytes'])}: {criteo['hot_samples']:.1%}",
            NOTHING,
        ),
        (
            "bytes between host and device, hot and cold batches as in FAE (Criteo)",
            NOTHING,
            f"{sent['embeddings'] / sent['fae']:.2f}x fewer, counted",
            _milliseconds(criteo, "fae"),
        ),
        (
            "bytes between host and device, distinct rows and hot rows (Criteo)",
            NOTHING,
            f"{sent['embeddings'] / sent['hot_rows']:.2f}x fewer, counted",
            _milliseconds(criteo, "hot_rows"),
        ),
        ("training time, CPU only / FAE", "2.3x", "no GPU here", NOTHING),
        ("training time, CPU and GPU / FAE", "1.52x", "no GPU here", NOTHING),
    ]
    for w in results.workloads("FAE, Criteo, hot batches"):
        ratio = w.systems["fused_hot_batches_every_8"].against_fused
        assert ratio is not None
        faster = f"{1 / ratio.median:.2f}x"
        what = (
            f"hot batches, {w.config.link or 'loopback'}: with the exchange / synced every 8 steps"
        )
        rows.append((what, NOTHING, faster, NOTHING))
    return {**made, "fae side by side": side_by_side(rows)}


def draw(results: Results, path: Path) -> bool:
    """Draws what hot sets take over their size; returns whether there is anything to draw."""
    stored = results.of("fae")
    if stored is None:
        return False
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name, found in stored.items():
        sizes = [line["rows"] for line in found["coverage"]]
        values = [100 * line["sampled"] for line in found["coverage"]]
        (line,) = axes.plot(sizes, values, marker=".", label=f"{name}: accesses")
        samples = [100 * line["sampled_samples"] for line in found["coverage"]]
        axes.plot(sizes, samples, "--", marker=".", color=line.get_color(), label=f"{name}: inputs")
    axes.set_xscale("log")
    axes.set_xlabel("hot rows, picked by 5 % of the inputs")
    axes.set_ylabel("% that is hot")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
