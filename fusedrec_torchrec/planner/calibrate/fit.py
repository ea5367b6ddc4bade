"""From measured steps to the links and rates of a cluster: least squares, nothing negative."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.planner.cost.cluster import GB, ClusterConfig, LinkConfig, RatesConfig
from fusedrec_torchrec.planner.cost.stages import IN_BYTES, Step
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = ["Timed", "fit", "fit_link", "non_negative"]

CURVE_WEIGHT = 0.3  # of a size of a collective, to a step
RATES = ("ids", "lookup", "pooling", "hot", "bag_ids", "bag_lookup", "owner_ids")
FIXED = ("step", "table", "bucket")  # microseconds
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Timed:
    """Is a step as the cost model sees it, and how long it took."""

    step: Step
    seconds: float


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Returns latency in microseconds and bandwidth in GB/s of a line through measurements.

    Relative errors count, so that small messages do, too.
    """
    size, time_ = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    latency, per_byte = non_negative(np.stack([np.ones_like(size), size], 1), time_)
    return float(latency) * 1e6, 1 / max(float(per_byte), 1e-15) / GB


def work_of(step: Step) -> list[float]:
    """Returns the work of a step: itself, tables, buckets, what limits its stages, as of rates."""
    amounts = dict.fromkeys(RATES, 0.0)
    for stage in step.stages:
        if not stage.is_collective:
            unit = GB if stage.kind in IN_BYTES else 1e6
            amounts[stage.kind] += float(stage.amount_W.max()) / unit
    return [1e-6, step.tables * 1e-6, (step.buckets - 1) * 1e-6, *amounts.values()]


def wire_of(step: Step, local: int) -> list[float]:
    """Returns the collectives of a step, and bytes of the busiest rank in them that leave its node.

    Bytes of collectives that run beside other work come last.
    """
    away = 1.0 if local == step.ranks else (step.ranks - local) / (step.ranks - 1)
    stages = [stage for stage in step.stages if stage.is_collective and not stage.can_hide]
    beside = [stage for stage in step.stages if stage.is_collective and stage.can_hide]
    sent, other = (sum(float(stage.amount_W.max()) for stage in some) for some in (stages, beside))
    return [len(stages) * 1e-6, away * sent / GB, away * other / GB]


def fit(
    cluster: ClusterConfig,
    curve: Sequence[tuple[float, float]],
    measured: Sequence[Timed],
    rates: ClusterConfig | None = None,
) -> ClusterConfig:
    """Returns the cluster with latency, bandwidth and rates fitted to steps by least squares.

    What links take in a step counts, which is not what they take in a loop of their own; the curve
    of the collective alone has a say where steps leave it open.

    Args:
        cluster: with what is known, such as links within nodes.
        curve: bytes and seconds of all-to-alls.
        measured: steps.
        rates: where rates are known from; None to find them, too.
    """
    systems = list(dict.fromkeys(timed.step.system for timed in measured))
    local = cluster.local_ranks
    free = [] if rates is not None else systems
    matrix, wanted, weights = [], [], []
    for timed in measured:
        row, left = wire_of(timed.step, local), timed.seconds
        if rates is not None:
            own = rates.rates(timed.step.system)
            known = zip(RATES, work_of(timed.step)[len(FIXED) :], strict=True)
            left -= timed.step.overhead(rates) + sum(w / own.rate(n) for n, w in known)
        for system in free:
            of_this = timed.step.system == system
            row += work_of(timed.step) if of_this else [0.0] * (len(FIXED) + len(RATES))
        matrix.append(row)
        wanted.append(max(left, 0.02 * timed.seconds))
        weights.append(1 / timed.seconds)
    for size, seconds in curve:
        matrix.append([1e-6, size / GB, 0.0, *[0.0] * (len(free) * (len(FIXED) + len(RATES)))])
        wanted.append(seconds)
        weights.append(CURVE_WEIGHT / seconds)
    fitted = non_negative(np.array(matrix), np.array(wanted), np.array(weights))
    near = cluster.within_node if local < cluster.ranks else LinkConfig(latency=0.0)
    link = replace(
        cluster.between_nodes,
        latency=max(float(fitted[0]) - near.latency, 0.0),
        all_to_all=1 / max(float(fitted[1]), 1e-6),
    )
    hidden = 0.0
    if any(row[2] for row in matrix):  # some step has a sync
        hidden = min(max(1 - float(fitted[2]) / max(float(fitted[1]), 1e-6), 0.0), 1.0)
    cluster = replace(cluster, between_nodes=link, hidden=hidden)
    if local == cluster.ranks:
        cluster = replace(cluster, within_node=link)
    if rates is not None:
        kinds = ("fused", "stock", "table_wise", "row_wise", "column_wise")
        return replace(cluster, **{kind: getattr(rates, kind) for kind in kinds})
    return _with_rates(cluster, systems, fitted[3:].reshape(len(systems), -1))


def _with_rates(cluster: ClusterConfig, systems: Sequence[str], blocks: Floats) -> ClusterConfig:
    """Returns the cluster with the rates of each system, as they were fitted."""
    by_system = {
        "fused" if system == FUSED else system: RatesConfig(
            **{name: float(x) for name, x in zip(FIXED, block[: len(FIXED)], strict=True)},
            **{
                name: 1 / max(float(x), 1e-6)
                for name, x in zip(RATES, block[len(FIXED) :], strict=True)
            },
        )
        for system, block in zip(systems, blocks, strict=True)
    }
    stock = by_system.get("table_wise", RatesConfig())
    return replace(cluster, stock=stock, **by_system)  # type: ignore[arg-type]


def non_negative(matrix: Floats, wanted: Floats, weights: Floats | None = None) -> Floats:
    """Returns the best solution without negative numbers (Lawson and Hanson's active sets).

    Relative to what is wanted, unless there are other weights.
    """
    weights = 1 / wanted if weights is None else weights
    scale = np.maximum(np.abs(matrix * weights[:, None]).max(0), 1e-300)
    a, b = matrix * weights[:, None] / scale, wanted * weights
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], bool)
    for _ in range(10 * a.shape[1]):
        slope = a.T @ (b - a @ x)
        if free.all() or slope[~free].max() < 1e-10:
            break
        free[np.flatnonzero(~free)[slope[~free].argmax()]] = True
        while True:
            best = np.zeros_like(x)
            best[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if best[free].min() > 0:
                break
            falling = free & (best <= 0)
            share = (x[falling] / np.maximum(x[falling] - best[falling], 1e-300)).min()
            x = x + share * (best - x)
            free &= x > 1e-14
            x[~free] = 0.0
            if not free.any():
                break
        x = best
    return x / scale
