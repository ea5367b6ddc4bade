"""From measured steps to the links and rates of a cluster: least squares, nothing negative."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.planner.calibrate.stage_times import GROUPS
from fusedrec_torchrec.planner.cost.cluster import GB, ClusterConfig, LinkConfig, RatesConfig
from fusedrec_torchrec.planner.cost.stages import IN_BYTES, Step
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = ["Timed", "fit", "fit_link", "non_negative"]

CURVE_WEIGHT = 0.3  # of a size of a collective, to a step
STAGES_WEIGHT = 0.5  # of a group of stages, to a step
USUAL_WEIGHT = 0.001  # of the rates that a cluster has unless a file says more, to a step
RATES = ("ids", "lookup", "pooling", "hot", "bag_ids", "bag_lookup", "owner_ids")
FIXED = ("step", "table", "bucket")  # microseconds
LINK = "link"
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Timed:
    """Is a step as the cost model sees it, and how long it took.

    Attributes:
        step: what it had to do.
        seconds: of the whole step.
        of_stages: of groups of its stages (``stage_times.GROUPS``), if they were timed.
    """

    step: Step
    seconds: float
    of_stages: Mapping[str, float] = field(default_factory=dict, kw_only=True)


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Returns latency in microseconds and bandwidth in GB/s of a line through measurements.

    Relative errors count, so that small messages do, too.
    """
    size, time_ = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    latency, per_byte = non_negative(np.stack([np.ones_like(size), size], 1), time_)
    return float(latency) * 1e6, 1 / max(float(per_byte), 1e-15) / GB


def work_of(step: Step) -> dict[str, float]:
    """Returns the work of a step: itself, tables, buckets, what limits its stages, as of rates."""
    work = {"step": 1e-6, "table": step.tables * 1e-6, "bucket": (step.buckets - 1) * 1e-6}
    work |= dict.fromkeys(RATES, 0.0)
    for stage in step.stages:
        if not stage.is_collective:
            unit = GB if stage.kind in IN_BYTES else 1e6
            work[stage.kind] += float(stage.amount_W.max()) / unit
    return work


def wire_of(step: Step, local: int) -> dict[str, float]:
    """Returns the collectives of a step, and bytes of the busiest rank in them that leave its node.

    Bytes of collectives that run beside other work are apart.
    """
    away = 1.0 if local == step.ranks else (step.ranks - local) / (step.ranks - 1)
    stages = [stage for stage in step.stages if stage.is_collective and not stage.can_hide]
    beside = [stage for stage in step.stages if stage.is_collective and stage.can_hide]
    sent, other = (sum(float(stage.amount_W.max()) for stage in some) for some in (stages, beside))
    return {"latency": len(stages) * 1e-6, "bytes": away * sent / GB, "beside": away * other / GB}


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
    equations = _Equations()
    systems = dict.fromkeys(timed.step.system for timed in measured)
    for system in systems if rates is None else ():  # what steps do not tell apart is as usual
        for name in RATES:
            usual = RatesConfig().rate(name)
            equations.add({system: {name: usual}}, 1.0, USUAL_WEIGHT)
    for timed in measured:
        wire, work = wire_of(timed.step, cluster.local_ranks), work_of(timed.step)
        system, left = timed.step.system, timed.seconds
        if rates is None:
            equations.add({LINK: wire, system: work}, left, 1 / left)
            _add_stages(equations, timed, work)
            continue
        own = rates.rates(system)
        left -= timed.step.overhead(rates) + sum(work[name] / own.rate(name) for name in RATES)
        equations.add({LINK: wire}, max(left, 0.02 * timed.seconds), 1 / timed.seconds)
    for size, seconds in curve:
        wire = {"latency": 1e-6, "bytes": size / GB}
        equations.add({LINK: wire}, seconds, CURVE_WEIGHT / seconds)
    fitted = equations.solve()
    cluster = _with_link(cluster, fitted[LINK])
    if rates is not None:
        kinds = ("fused", "stock", "table_wise", "row_wise", "column_wise")
        return replace(cluster, **{kind: getattr(rates, kind) for kind in kinds})
    return _with_rates(cluster, {system: fitted[system] for system in systems})


def _add_stages(equations: "_Equations", timed: Timed, work: Mapping[str, float]) -> None:
    """Adds an equation for each group of stages that was timed.

    What does not grow with the work of a group has unknowns of the group's own.
    """
    for name, seconds in timed.of_stages.items():
        of_rates = {rate: work[rate] for rate in GROUPS[name].rates}
        fixed = {part: work[part] for part in FIXED}
        equations.add({timed.step.system: of_rates, name: fixed}, seconds, STAGES_WEIGHT / seconds)


def _with_link(cluster: ClusterConfig, link: Mapping[str, float]) -> ClusterConfig:
    """Returns the cluster with the link between its nodes, or ranks, as it was fitted."""
    near = LinkConfig(latency=0.0)
    if cluster.local_ranks < cluster.ranks:
        near = cluster.within_node
    far = replace(
        cluster.between_nodes,
        latency=max(link.get("latency", 0.0) - near.latency, 0.0),
        all_to_all=1 / max(link.get("bytes", 0.0), 1e-6),  # one rank sends nothing
    )
    hidden = 0.0
    if "beside" in link:  # some step has a sync
        hidden = min(max(1 - link["beside"] / max(link["bytes"], 1e-6), 0.0), 1.0)
    cluster = replace(cluster, between_nodes=far, hidden=hidden)
    return replace(cluster, within_node=far) if cluster.local_ranks == cluster.ranks else cluster


def _with_rates(cluster: ClusterConfig, fitted: Mapping[str, Mapping[str, float]]) -> ClusterConfig:
    """Returns the cluster with the rates of each system, as they were fitted."""
    by_system = {
        "fused" if system == FUSED else system: RatesConfig(
            **{name: own.get(name, 0.0) for name in FIXED},
            **{name: 1 / max(own.get(name, 0.0), 1e-6) for name in RATES},
        )
        for system, own in fitted.items()
    }
    stock = by_system.get("table_wise", RatesConfig())
    return replace(cluster, stock=stock, **by_system)  # type: ignore[arg-type]


class _Equations:
    """Collects equations whose unknowns have names, such as the rates of a system."""

    def __init__(self) -> None:
        self._unknowns: dict[tuple[str, str], int] = {}
        self._rows: list[dict[int, float]] = []
        self._wanted: list[float] = []
        self._weights: list[float] = []

    def add(self, factors: Mapping[str, Mapping[str, float]], wanted: float, weight: float) -> None:
        """Adds an equation: the sum of unknowns, each with its factor, is what is wanted."""
        row = {
            self._unknowns.setdefault((of, name), len(self._unknowns)): factor
            for of, by_name in factors.items()
            for name, factor in by_name.items()
            if factor
        }
        self._rows.append(row)
        self._wanted.append(wanted)
        self._weights.append(weight)

    def solve(self) -> dict[str, dict[str, float]]:
        """Returns the unknowns that have a factor in some equation; none of them is negative."""
        matrix = np.zeros((len(self._rows), len(self._unknowns)))
        for values, row in zip(matrix, self._rows, strict=True):
            values[list(row)] = list(row.values())
        solution = non_negative(matrix, np.array(self._wanted), np.array(self._weights))
        fitted: dict[str, dict[str, float]] = {}
        for (of, name), value in zip(self._unknowns, solution, strict=True):
            fitted.setdefault(of, {})[name] = float(value)
        return fitted


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
