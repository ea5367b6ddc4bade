"""The explanation of a plan as one HTML file: interactive, self-contained, to be mailed around."""

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from fusedrec_torchrec.core.files import write_text
from fusedrec_torchrec.core.terminal import human_bytes
from fusedrec_torchrec.planner.cost.cluster import GB, MB, ClusterConfig, LinkConfig
from fusedrec_torchrec.planner.report.explain import COLUMNS, Explanation, milliseconds
from fusedrec_torchrec.planner.search.decide import again, decide
from fusedrec_torchrec.planner.search.decision import Decision
from fusedrec_torchrec.sharding.sharding_type import FUSED

__all__ = ["page", "write_report"]

MOST_RANKS, MOST_CURVES, MOST_ROWS, MOST_TICKS = 128, 24, 400, 16
HOT_MB = (0, 1, 4, 16, 64, 256, 1024)
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
COLORS = {  # kinds of stages, the same in all plots
    "start of the step": "#9aa0a6",
    "ids": "#f4b400",
    "wire": "#4285f4",
    "lookup": "#0f9d58",
    "pooling": "#7cb342",
    "hot rows": "#db4437",
    "2D sync": "#ab47bc",
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #202124; max-width: 1100px; margin: 2em auto;
       padding: 0 1.5em; }
h1 { font-size: 1.6em; margin-bottom: .2em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid #e8eaed; }
th:first-child, td:first-child, .text { text-align: left; } th { color: #5f6368; }
td.chosen { background: #e6f4ea; font-weight: 600; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 1em 0; }
.card { border: 1px solid #dadce0; border-radius: 8px; padding: 8px 16px; min-width: 130px; }
.card b { display: block; font-size: 1.35em; } .note { color: #5f6368; }
.scroll { max-height: 480px; overflow: auto; }
"""
LAYOUT: dict[str, Any] = {
    "template": "plotly_white",
    "margin": {"l": 70, "r": 20, "t": 30, "b": 50},
    "height": 380,
    "legend": {"orientation": "h", "y": 1.12},
}


def write_report(path: Path, explanation: Explanation) -> None:
    """Writes all about a plan."""
    write_text(path, report(explanation))


def report(explanation: Explanation) -> str:
    """Returns the page as HTML."""
    decision = explanation.decision
    cluster = decision.cluster
    advice = "".join(
        f"<li>{html.escape(hint.what)} saves {hint.saves:.0%}</li>" for hint in explanation.advice()
    )
    sections = [
        ("Tables", _tables(explanation)),
        ("Plans", _plot("breakdown", _breakdown(explanation))),
        ("Load of the ranks", _plot("load", _load(explanation))),
        ("How much the most used rows take", _plot("coverage", _coverage(decision))),
    ]
    sections += [
        (f"What if: {name}", _plot(f"what-if-{i}", figure))
        for i, (name, figure) in enumerate(_what_ifs(explanation))
    ]
    groups = "one group"
    if decision.groups.number > 1:
        groups = f"{decision.groups.number} groups of {decision.groups.size}"
    cards = {
        "a step": f"{milliseconds(decision.seconds)} ms",
        "a rank sends": human_bytes(decision.bytes_sent / decision.ranks),
        "of the fullest rank": human_bytes(float(decision.memory_W.max())),
        "hot rows": f"{sum(map(len, decision.hot.values())):,}",
        "ranks": f"{decision.ranks}, {groups}",
        "ids travel": "exact counts" if decision.exact_counts else "single shot",
    }
    body = "".join(
        f'<div class="card"><span class="note">{name}</span><b>{html.escape(value)}</b></div>'
        for name, value in cards.items()
    )
    head = (
        f"<h1>Plan for {html.escape(cluster.name)}</h1>"
        f'<div class="note">{len(decision.tables)} tables, {decision.batch} samples a rank</div>'
        f'<div class="cards">{body}</div>'
        f"<p>Codecs: {html.escape(explanation.codecs())}.</p>"
        f"<p>What limits: {html.escape(explanation.limit())}.</p>"
        + (f"<p>What would help:</p><ul>{advice}</ul>" if advice else "")
    )
    return page(
        f"Plan for {cluster.name}",
        head + "".join(f"<h2>{html.escape(name)}</h2>{text}" for name, text in sections),
    )


def page(title: str, body: str) -> str:
    """Returns an HTML page that has all it needs in itself."""
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body>{body}</body></html>"
    )


def _plot(name: str, figure: go.Figure) -> str:
    text: str = figure.to_html(
        include_plotlyjs=False, full_html=False, div_id=name, config={"displaylogo": False}
    )
    return text


def kind_of(stage: str, kind: str, is_collective: bool) -> str:
    """Returns what a stage of a step is in the plots."""
    if stage.startswith("hot"):
        return "hot rows"
    if stage.startswith("sync"):
        return "2D sync"
    if is_collective:
        return "wire"
    as_lookup = ("host_lookup", "bag_lookup", "owner_ids")
    return "lookup" if kind in as_lookup else {"bag_ids": "ids"}.get(kind, kind)


def _by_kind(decision: Decision) -> dict[str, float]:
    """Returns the milliseconds of each kind of stage."""
    cluster = decision.cluster
    sums = dict.fromkeys(COLORS, 0.0)
    for step in decision.steps:
        sums["start of the step"] += 1e3 * step.overhead(cluster)
        for stage, seconds in zip(step.stages, step.seconds_of_stages(cluster), strict=True):
            sums[kind_of(stage.name, stage.kind, stage.is_collective)] += 1e3 * seconds
    return sums


def _breakdown(explanation: Explanation) -> go.Figure:
    names = list(explanation.alternatives)
    sums = [_by_kind(plan) for plan in explanation.alternatives.values()]
    figure = go.Figure(layout={**LAYOUT, "barmode": "stack", "xaxis_title": "ms a step"})
    for kind, color in COLORS.items():
        values = [by_kind[kind] for by_kind in sums]
        if any(values):
            figure.add_bar(y=names, x=values, name=kind, marker_color=color, orientation="h")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


def _load(explanation: Explanation) -> go.Figure:
    decision = explanation.decision
    size = decision.groups.size
    shown = np.unique(np.linspace(0, size - 1, min(size, MOST_RANKS)).astype(int))
    figure = go.Figure(
        layout={
            **LAYOUT,
            "barmode": "stack",
            "xaxis": {
                "title": "rank" + (" of a group" if decision.groups.number > 1 else ""),
                # Ranks are whole numbers, which plotly does not know.
                "tickvals": shown[:: -(-len(shown) // MOST_TICKS)].tolist(),
            },
            "yaxis": {"title": "ms busy"},
            "yaxis2": {"title": "GB", "overlaying": "y", "side": "right", "rangemode": "tozero"},
        }
    )
    by_kind: dict[str, Any] = {}
    for step, stage, _ in explanation.stages():
        busy_W = 1e3 * stage.seconds_W(decision.cluster, step.rates(decision.cluster))
        kind = kind_of(stage.name, stage.kind, stage.is_collective)
        by_kind[kind] = by_kind.get(kind, 0.0) + busy_W
    for kind, busy in by_kind.items():
        figure.add_bar(x=shown, y=busy[shown], name=kind, marker_color=COLORS[kind])
    memory = decision.memory_W[shown] / GB
    figure.add_scatter(
        x=shown,
        y=memory,
        yaxis="y2",
        name="memory, GB",
        mode="markers",
        marker={"color": "#202124", "symbol": "diamond"},
    )
    return figure


def _coverage(decision: Decision) -> go.Figure:
    figure = go.Figure(
        layout={
            **LAYOUT,
            "xaxis": {"title": "most used rows", "type": "log"},
            "yaxis": {"title": "share of accesses", "tickformat": ".0%", "range": [0, 1.02]},
            "legend": {"orientation": "v"},
        }
    )
    order = sorted(decision.tables, key=lambda t: -t.ids(decision.batch) * t.dim)
    shown: list[Any] = []
    for table in order:  # one of those that are alike
        if len(shown) < MOST_CURVES and not any(t.classes is table.classes for t in shown):
            shown.append(table)
    for table in shown:
        rows = np.unique(np.geomspace(1, max(table.rows, 1), 60).astype(np.int64))
        covered = [table.classes.coverage(float(n)) for n in rows]
        hot = len(decision.hot.get(table.name, ()))
        name = table.name + (f", {hot:,} hot" if hot else "")
        figure.add_scatter(x=rows, y=covered, name=name, mode="lines")
    return figure


@dataclass(frozen=True)
class WhatIf:
    """Is a slider: a setting, its positions, and the plan at each of them."""

    name: str
    unit: str
    positions: Sequence[float]
    now: float
    plan: Callable[[float], Decision]


def _sliders(explanation: Explanation) -> Iterator[WhatIf]:
    decision, search = explanation.decision, explanation.search
    cluster = decision.cluster
    known = any(table.places is not None for table in decision.tables)
    if decision.groups.number == 1 and FUSED in decision.systems and known:
        memory = sorted({*HOT_MB, search.hot.memory})
        yield WhatIf(
            "memory for hot rows",
            "MB",
            memory,
            search.hot.memory,
            lambda mb: again(decision, replace(search, hot=replace(search.hot, memory=mb))),
        )
    yield WhatIf(
        "speed of the links",
        "x",
        FACTORS,
        1.0,
        lambda factor: again(decision, search, with_links(cluster, factor)),
    )
    batches = sorted({max(int(decision.batch * factor), 1) for factor in FACTORS})
    yield WhatIf(
        "samples a rank",
        "samples",
        batches,
        decision.batch,
        lambda batch: again(replace(decision, batch=int(batch)), search),
    )
    node = cluster.ranks_per_node
    counts = sorted({cluster.ranks, *(cluster.ranks * f // 4 for f in (1, 2, 8, 16))})
    fit = [n for n in counts if n >= 2 and (n <= node or n % node == 0)]
    one = replace(search, groups=replace(search.groups, sizes=[]))
    yield WhatIf(
        "ranks, each with as many samples, one group",
        "ranks",
        fit,
        cluster.ranks,
        lambda ranks: decide(
            decision.tables,
            decision.batch,
            replace(cluster, ranks=int(ranks)),
            one,
            sorted(explanation.unfit),
        ),
    )


def with_links(cluster: ClusterConfig, factor: float) -> ClusterConfig:
    """Returns the cluster with links so many times as fast."""

    def times(link: LinkConfig) -> LinkConfig:
        speed = (factor * link.all_to_all, factor * link.all_reduce)
        return replace(link, all_to_all=speed[0], all_reduce=speed[1])

    within, between = times(cluster.within_node), times(cluster.between_nodes)
    return replace(cluster, within_node=within, between_nodes=between)


def _what_ifs(explanation: Explanation) -> Iterator[tuple[str, go.Figure]]:
    for what_if in _sliders(explanation):
        plans: list[tuple[float, Decision]] = []
        for position in what_if.positions:
            try:
                plans.append((position, what_if.plan(position)))
            except ValueError:  # such as more memory than there is
                continue
        if plans:
            yield what_if.name, _slider_figure(what_if, plans)


def _slider_figure(what_if: WhatIf, plans: Sequence[tuple[float, Decision]]) -> go.Figure:
    kinds = list(COLORS)
    bars = [[_by_kind(decision)[kind] for kind in kinds] for _, decision in plans]
    most = max(map(max, bars)) * 1.05

    def title(decision: Decision) -> str:
        rate = decision.batch * decision.ranks / decision.seconds
        hot = sum(map(len, decision.hot.values()))
        return (
            f"{milliseconds(decision.seconds)} ms a step, {rate:,.0f} samples a second"
            + (f", {hot:,} hot rows" if hot else "")
            + f", a rank sends {decision.bytes_sent / decision.ranks / MB:,.3g} MB"
        )

    places = [position for position, _ in plans]
    active = places.index(what_if.now) if what_if.now in places else 0
    figure = go.Figure(
        go.Bar(x=kinds, y=bars[active], marker_color=[COLORS[kind] for kind in kinds])
    )
    steps = [
        {
            "method": "update",
            "label": f"{position:g}",
            "args": [{"y": [values]}, {"title.text": title(decision)}],
        }
        for (position, decision), values in zip(plans, bars, strict=True)
    ]
    figure.update_layout(
        {
            **LAYOUT,
            "margin": {"l": 70, "r": 20, "t": 60, "b": 50},
            "title": {"text": title(plans[active][1]), "font": {"size": 15}},
            "yaxis": {"title": "ms", "range": [0, most]},
            "sliders": [
                {
                    "active": active,
                    "steps": steps,
                    "currentvalue": {"suffix": f" {what_if.unit}"},
                    "pad": {"t": 40},
                }
            ],
        }
    )
    return figure


def _tables(explanation: Explanation) -> str:
    decision = explanation.decision
    names = ("table", "rows", "ids", "distinct", "bags", "hot rows", *COLUMNS.values(), "why")
    head = "".join(f"<th>{name}</th>" for name in names)
    lines = []
    for t, table in enumerate(decision.tables[:MOST_ROWS]):
        bags = f"{table.distinct_bags(decision.batch).bags:,.0f}" if table.pooled else "-"
        cells = [
            f"<td>{html.escape(table.name)}</td>",
            f"<td>{table.rows:,} x {table.dim}</td>",
            f"<td>{table.ids(decision.batch):,.0f}</td>",
            f"<td>{table.unique(decision.batch):,.0f}</td>",
            f"<td>{bags}</td>",
            f"<td>{len(decision.hot.get(table.name, ())) or ''}</td>",
        ]
        for system in COLUMNS:
            mark = " class=chosen" if decision.systems[t] == system else ""
            cells.append(f"<td{mark}>{milliseconds(explanation.price(t, system))}</td>")
        why = f"{decision.systems[t]}: {explanation.why(t)}"
        cells.append(f"<td>{html.escape(why)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    more = len(decision.tables) - len(lines)
    return (
        '<p class="note">Milliseconds that each sharding would add to a step; chosen ones are '
        "marked.</p>"
        f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'
        + (f'<p class="note">{more} more tables.</p>' if more > 0 else "")
    )
