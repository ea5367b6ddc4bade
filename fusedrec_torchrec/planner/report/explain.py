"""A decision for people: what was chosen, what else it would have cost, what limits, what helps."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fusedrec_torchrec.codecs.options import Codecs
from fusedrec_torchrec.core.terminal import human_bytes, print_table
from fusedrec_torchrec.planner.cost.cluster import GB, MB, ClusterConfig, LinkConfig
from fusedrec_torchrec.planner.cost.step import STOCK, Stage, Step
from fusedrec_torchrec.planner.report.reasons import fewest_rows_travel, rows_and_bags
from fusedrec_torchrec.planner.search.decide import again, alike, decide
from fusedrec_torchrec.planner.search.decision import Decision
from fusedrec_torchrec.planner.search.owners import WHOLE, column_splits
from fusedrec_torchrec.planner.search.prices import LOADS, OWNED, Prices, owned_as
from fusedrec_torchrec.planner.search.search_config import SearchConfig
from fusedrec_torchrec.sharding.sharding_type import (
    FUSED,
    FUSED_COLUMN_WISE,
    FUSED_TABLE_WISE,
    FUSED_TYPES,
    OWNER_POOLED,
)

__all__ = ["Explanation", "print_explanation"]

MOST_TABLES = 60  # that are shown
MOST_RANKS = 16
BAR = 24
WORTH_TELLING = 0.01
CODED = ("rows", "gradients")  # stages of a step that codecs are about
MORE_HOT_MB = (64, 256, 1024)
COLUMNS = {
    FUSED: "fused",
    FUSED_TABLE_WISE: "fused table",
    FUSED_COLUMN_WISE: "fused column",
    "table_wise": "table",
    "row_wise": "row",
    "column_wise": "column",
    "data_parallel": "data parallel",
}


@dataclass(frozen=True)
class Advice:
    """Is something that would make the step shorter, and by which share of it."""

    what: str
    saves: float


class Explanation:
    """Says what there is to say about a decision.

    Args:
        decision: that was made.
        search: what it was free to decide.
        unfit: tables that cannot be fused.
    """

    def __init__(self, decision: Decision, search: SearchConfig, unfit: Sequence[str] = ()) -> None:
        self.decision, self.search = decision, search
        systems = [*FUSED_TYPES, *STOCK]
        if decision.groups.number > 1:  # where no table is data-parallel
            systems.remove("data_parallel")
        self.prices = Prices(
            decision.tables,
            decision.batch,
            decision.cluster,
            decision.groups,
            systems,
            decision.on_host,
            decision.exact_counts,
        )
        self.unfit = set(unfit)
        self.alternatives = self._alternatives()

    def price(self, t: int, system: str) -> float | None:
        """Returns the seconds that a table adds to a step; None if it cannot be sharded so."""
        table = self.decision.tables[t]
        ranks, room = self.decision.groups.size, self.decision.cluster.memory * GB
        cannot = system in FUSED_TYPES and table.name in self.unfit
        if system in OWNER_POOLED and not (table.pooled and table.can_be_owned):
            cannot = True
        if system == "column_wise" and table.dim % (4 * ranks):
            cannot = True
        splits = column_splits(table.dim, ranks)
        if system == FUSED_COLUMN_WISE and not splits:
            cannot = True
        if system in (*WHOLE, "data_parallel") and table.size > room:
            cannot = True
        kind = owned_as(system)
        if self.decision.on_host[t] and (kind or system == "data_parallel"):
            cannot = True
        if cannot or system not in self.prices.of_use:
            return None
        if kind and not any(s in self.decision.systems for s in OWNED[kind]):
            alone = []  # no other table makes up for it
            for owners in splits if system == FUSED_COLUMN_WISE else (1,):
                loads_KW = np.zeros((LOADS, ranks))
                loads_KW[:, :owners] = self.prices.load_of(kind, t, owners)[:, None]
                alone.append(self.prices.of_owned(kind, loads_KW))
            return float(self.prices.of_tables[system][t]) + min(alone)
        return float(self.prices.balanced(system)[t])

    def why(self, t: int) -> str:
        """Returns why a table is sharded as it is, by the rows that travel for a rank's batch."""
        table, system = self.decision.tables[t], self.decision.systems[t]
        batch = self.decision.batch
        rows = table.unique(batch)
        if table.name in self.unfit:
            return "it cannot be fused: columns, data type or optimizer"
        if not table.pooled:
            how = "travel" if system == FUSED else "in a batch; the step is shorter"
            return f"a sequence: {rows:,.0f} distinct rows {how}"
        if system not in FUSED_TYPES:
            bags = table.distinct_bags(batch).bags
            return f"{rows:,.0f} distinct rows, {bags:,.0f} distinct bags; the step is shorter"
        fewest = fewest_rows_travel(system, table, batch)
        if fewest is not None:
            return fewest + self._why_columns(t)
        return f"{self._why_more(t)}: {rows_and_bags(system, table, batch)}{self._why_columns(t)}"

    def _why_more(self, t: int) -> str:
        """Returns why a table is pooled where more rows travel."""
        table = self.decision.tables[t]
        if self.decision.systems[t] in OWNER_POOLED:
            return "work at the requester"
        if table.size > self.decision.cluster.memory * GB:
            return f"memory, {human_bytes(table.size)} do not fit on a rank"
        if not table.can_be_owned:
            return "its bags cannot be pooled by an owner"
        if self.decision.hot.get(table.name) is not None:
            return "hot rows"
        return "balance, memory or another bucket"

    def _why_columns(self, t: int) -> str:
        """Returns why the columns of a table are split, if they are."""
        if self.decision.systems[t] != FUSED_COLUMN_WISE:
            return ""
        table, ranks = self.decision.tables[t], len(self.decision.owners[t])
        if table.size > self.decision.cluster.memory * GB:
            return f"; columns on {ranks} ranks, as {human_bytes(table.size)} do not fit on one"
        return f"; columns on {ranks} ranks for balance or memory"

    def _alternatives(self) -> dict[str, Decision]:
        """Returns the plan and plainer ones, by name."""
        decision, search = self.decision, self.search
        plans = {"this plan": decision}
        if decision.hot:
            without = replace(search, hot=replace(search.hot, memory=0.0))
            plans["without hot rows"] = again(decision, without)
        if not decision.codecs.are_exact:
            plans["rows and gradients as fp32"] = again(decision, replace(search, codecs=[]))
        if decision.ranges is not None:
            plans["with even row ranges"] = again(decision, replace(search, row_ranges="even"))
        if decision.groups.number > 1:
            one = replace(search, groups=replace(search.groups, sizes=[]))
            with suppress(ValueError):  # it may not fit, which may be why there are groups
                plans["in one group"] = decide(
                    decision.tables, decision.batch, decision.cluster, one, sorted(self.unfit)
                )
        for system in (FUSED, FUSED_TABLE_WISE, "table_wise", "row_wise", "column_wise"):
            if set(decision.systems) == {system} and decision.groups.number == 1:
                continue
            if system in FUSED_TYPES and self.unfit:
                continue
            other = alike(decision, system, search)
            if other is not None:
                plans[f"all {system}"] = other
        return plans

    def stages(self) -> list[tuple[Step, Stage, float]]:
        """Returns the stages of the step with their seconds, in its order."""
        cluster = self.decision.cluster
        return [
            (step, stage, seconds)
            for step in self.decision.steps
            for stage, seconds in zip(step.stages, step.seconds_of_stages(cluster), strict=True)
        ]

    def overhead(self) -> float:
        """Returns the seconds of the step that do not depend on the size of anything."""
        return sum(step.overhead(self.decision.cluster) for step in self.decision.steps)

    def busy_W(self) -> NDArray[np.float64]:
        """Returns the seconds that each rank of a group is busy in a step."""
        cluster = self.decision.cluster
        return np.sum(
            [stage.seconds_W(cluster, step.rates(cluster)) for step, stage, _ in self.stages()],
            axis=0,
        )

    def codecs(self) -> str:
        """Returns how rows and gradients of fused tables travel, and what that saves."""
        decision = self.decision
        if not decision.fused_numbers:
            return "none, no table is fused"
        chosen, exact = (
            sum(stage.bytes_sent for s in plan.steps for stage in s.stages if stage.name in CODED)
            for plan in (decision, replace(decision, codecs=Codecs()))
        )
        text = f"{decision.codecs}: a rank sends {human_bytes(chosen / decision.ranks)} of them"
        if decision.codecs.are_exact:
            return text
        before = human_bytes(exact / decision.ranks)
        return f"{text} in a step, {before} as fp32, {exact / max(chosen, 1e-30):.1f} x fewer"

    def limit(self) -> str:
        """Returns what the step spends most of its time on."""
        total = self.decision.seconds
        kinds: dict[str, float] = {"Python and starting kernels": self.overhead()}
        latency = 0.0
        cluster = self.decision.cluster
        for step, stage, seconds in self.stages():
            if stage.is_collective:
                empty = replace(stage, amount_W=np.zeros(1)).seconds(cluster, step.rates(cluster))
                latency += empty
                kinds["bytes on the wire"] = kinds.get("bytes on the wire", 0) + seconds - empty
            else:
                name = {
                    "ids": "ids at the requester",
                    "bag_ids": "bags at the requester",
                    "bag_lookup": "lookup and pooling at the owner",
                    "owner_ids": "ids of bags at the owner",
                    "hot": "looking for hot rows",
                }
                kind = name.get(stage.kind, f"{stage.kind.replace('_', ' ')} of rows")
                kinds[kind] = kinds.get(kind, 0) + seconds
        kinds["latency of collectives"] = latency
        most = max(kinds, key=lambda kind: kinds[kind])
        return f"{most}, {kinds[most] / max(total, 1e-30):.0%} of the step"

    def advice(self) -> list[Advice]:
        """Returns what would help, the most helpful first."""
        all_advice = [
            Advice(what, 1 - other.seconds / self.decision.seconds)
            for what, other in self._variations()
        ]
        worth = [advice for advice in all_advice if advice.saves >= WORTH_TELLING]
        return sorted(worth, key=lambda advice: -advice.saves)

    def _variations(self) -> Iterator[tuple[str, Decision]]:
        decision, search, cluster = self.decision, self.search, self.decision.cluster
        if decision.groups.number == 1 and FUSED in decision.systems:
            for more in MORE_HOT_MB:
                hot = replace(search.hot, memory=search.hot.memory + more)
                yield f"+{more} MB for hot rows", again(decision, replace(search, hot=hot))
            if search.hot.sync_every == 1:
                every = replace(search.hot, sync_every=8, memory=max(search.hot.memory, 256.0))
                yield (
                    "hot rows synced every 8 steps (search.hot.sync_every, not exact)",
                    again(decision, replace(search, hot=every)),
                )
        if search.codecs == [] and decision.fused_numbers:
            lossy = replace(search, codecs=["bf16"])
            yield "rows and gradients as bf16 (search.codecs, lossy)", again(decision, lossy)
        if not search.groups.sizes and cluster.ranks > cluster.ranks_per_node:
            size = cluster.ranks_per_node
            grouped = replace(search, groups=replace(search.groups, sizes=[size]))
            with suppress(ValueError):
                other = decide(
                    decision.tables, decision.batch, cluster, grouped, sorted(self.unfit)
                )
                yield f"2D parallelism, groups of {size} (search.groups.sizes)", other
        faster = _faster(cluster)
        what = "between nodes" if cluster.ranks > cluster.ranks_per_node else "between ranks"
        yield f"links {what} twice as fast", again(decision, search, faster)


def _faster(cluster: ClusterConfig) -> ClusterConfig:
    def twice(link: LinkConfig) -> LinkConfig:
        return replace(link, all_to_all=2 * link.all_to_all, all_reduce=2 * link.all_reduce)

    if cluster.ranks > cluster.ranks_per_node:
        return replace(cluster, between_nodes=twice(cluster.between_nodes))
    return replace(cluster, within_node=twice(cluster.within_node))


def milliseconds(seconds: float | None) -> str:
    """Returns a time as text."""
    return "-" if seconds is None else f"{1e3 * seconds:.3g}"


def print_explanation(explanation: Explanation) -> None:
    """Prints all of an explanation as text."""
    decision, cluster = explanation.decision, explanation.decision.cluster
    size = sum(table.size for table in decision.tables)
    print(
        f"{len(decision.tables)} tables, {human_bytes(size)} with optimizer state, on "
        f"{cluster.ranks} ranks of {cluster.name}; {decision.batch} samples a rank"
    )
    _print_tables(explanation)
    _print_reasons(explanation)
    _print_alternatives(explanation)
    _print_breakdown(explanation)
    _print_ranks(explanation)
    print(f"codecs: {explanation.codecs()}")
    print(f"what limits: {explanation.limit()}")
    advice = explanation.advice()
    for hint in advice:
        print(f"what would help: {hint.what} saves {hint.saves:.0%}")
    if not advice:
        print("what would help: nothing that was looked at saves 1 %")


def _print_tables(explanation: Explanation) -> None:
    decision = explanation.decision
    prices = [[explanation.price(t, s) for s in COLUMNS] for t in range(len(decision.tables))]
    places = list(COLUMNS)
    chosen = [prices[t][places.index(s)] or 0.0 for t, s in enumerate(decision.systems)]
    rows: dict[tuple[object, ...], list[int]] = {}  # tables that are alike make one line
    for t in range(len(decision.tables)):
        table = decision.tables[t]
        ids, unique = table.ids(decision.batch), table.unique(decision.batch)
        bags = f"{table.distinct_bags(decision.batch).bags:,.0f}" if table.pooled else "-"
        how = decision.systems[t]
        if decision.on_host[t]:
            how += ", host memory"
        line = (
            f"{table.rows:,} x {table.dim}",
            f"{ids:,.0f}",
            f"{unique:,.0f}",
            bags,
            how,
            len(decision.hot.get(table.name, ())) or "",
            *map(milliseconds, prices[t]),
        )
        rows.setdefault(line, []).append(t)
    costly = sorted(rows, key=lambda line: -sum(chosen[t] for t in rows[line]))[:MOST_TABLES]
    left = len(decision.tables) - sum(len(rows[line]) for line in costly)
    print_table(
        "tables, and the milliseconds that each sharding would add to a step"
        + (f" (those that cost most; {left} more)" if left else ""),
        ("table", "rows", "ids", "distinct", "bags", "chosen", "hot rows", *COLUMNS.values()),
        [(_names(decision, rows[line]), *line) for line in rows if line in costly],
    )


def _print_reasons(explanation: Explanation) -> None:
    decision = explanation.decision
    reasons: dict[tuple[str, str, str], list[int]] = {}
    for t, system in enumerate(decision.systems):
        own = decision.owners[t]
        where = f"rank {own[0]}" if len(own) == 1 else f"columns on {len(own)} ranks" * bool(own)
        reasons.setdefault((system, where, explanation.why(t)), []).append(t)
    shown = list(reasons)[:MOST_TABLES]
    left = sum(len(reasons[reason]) for reason in list(reasons)[MOST_TABLES:])
    print_table(
        "why" + (f" ({left} more tables)" if left else ""),
        ("table", "chosen", "where", "why"),
        [(_names(decision, reasons[reason]), *reason) for reason in shown],
    )


def _names(decision: Decision, places: Sequence[int]) -> str:
    first = decision.tables[places[0]].name
    if len(places) == 1:
        return first
    return f"{first} ... {decision.tables[places[-1]].name}, {len(places)} tables"


def _print_alternatives(explanation: Explanation) -> None:
    best = explanation.decision.seconds
    print_table(
        "plans",
        ("plan", "ms a step", "compared", "MB a rank sends", "GB of the fullest rank"),
        [
            (
                name,
                milliseconds(plan.seconds),
                f"{plan.seconds / best:.2f} x",
                f"{plan.bytes_sent / plan.ranks / MB:.3g}",
                f"{plan.memory_W.max() / GB:.3g}",
            )
            for name, plan in explanation.alternatives.items()
        ],
    )


def _print_breakdown(explanation: Explanation) -> None:
    total = explanation.decision.seconds
    fused = {s for s in explanation.decision.systems if s in FUSED_TYPES}
    of_fused = "fused" if len(fused) > 1 else next(iter(fused), FUSED)
    rows = [("", "start of the step", "", milliseconds(explanation.overhead()), "", "")]
    for step, stage, seconds in explanation.stages():
        mean = float(stage.amount_W.mean())
        ratio = float(stage.amount_W.max()) / mean if mean else 1.0
        rows.append(
            (
                of_fused if step.system == FUSED else step.system,
                stage.name,
                human_bytes(stage.bytes_sent / len(stage.amount_W)) if stage.is_collective else "",
                milliseconds(seconds),
                f"{seconds / total:.0%}",
                f"{ratio:.2f}",
            )
        )
    print_table(
        f"a step, {milliseconds(total)} ms",
        ("sharding", "stage", "a rank sends", "ms", "share", "busiest to mean"),
        rows,
    )


def _print_ranks(explanation: Explanation) -> None:
    busy, memory = explanation.busy_W(), explanation.decision.memory_W
    shown = np.unique(np.linspace(0, len(busy) - 1, min(len(busy), MOST_RANKS)).astype(int))
    room = explanation.decision.cluster.memory * GB
    of_groups = " of a group" if explanation.decision.groups.number > 1 else ""
    print_table(
        f"ranks{of_groups}" + (f", {len(shown)} of {len(busy)}" if len(shown) < len(busy) else ""),
        ("rank", "busy ms", "", "memory", ""),
        [
            (
                rank,
                milliseconds(float(busy[rank])),
                bar(float(busy[rank] / max(busy.max(), 1e-30))),
                human_bytes(float(memory[rank])),
                bar(float(memory[rank]) / room),
            )
            for rank in shown.tolist()
        ],
    )


def bar(share: float) -> str:
    """Returns a share as a bar of text."""
    full = round(BAR * min(max(share, 0.0), 1.0))
    return "█" * full + "·" * (BAR - full)
