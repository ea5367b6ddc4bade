"""Makes the interactive charts of the site from the measurements in benchmarks/results.

A page asks for one by a mark such as ``<!-- plot speeds of mlperf -->``: a kind of chart, and the
suites it is about, joined by ``and``.  ``charts_in_pages`` puts it there.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from math import ceil, floor, log10
from pathlib import Path
from statistics import median
from typing import Any

from plotly import graph_objects as go
from plotly.subplots import make_subplots

from fusedrec_torchrec.bench.figures import (
    ALLOCATOR_TITLES,
    KINDS,
    WorkloadFigures,
    side_by_side,
)
from fusedrec_torchrec.bench.report import allocators_of
from fusedrec_torchrec.bench.results import RESULTS, load_results
from fusedrec_torchrec.bench.suite import CODEC_SYSTEMS
from fusedrec_torchrec.core.terminal import human_bytes

__all__ = ["CHARTS", "chart", "json_of"]

MEASURED = Path(__file__).parents[1] / "benchmarks" / "results"
# Neither too light for white pages nor too dark for black ones.
COLORS = {
    "table_wise": "#4c8ef7",
    "row_wise": "#f08c3a",
    "column_wise": "#a678de",
    "table_row_wise": "#b07d62",
    "planner": "#8f98a3",
    "data_parallel": "#b5a642",
    "table_wise_dedup": "#7fb0ff",
    "row_wise_dedup": "#f5b27d",
    "fused_row_wise": "#2fa866",
    "fused_table_wise": "#4fc78a",
    "fused_column_wise": "#1f9e9e",
    "fused_mixed": "#7d9e2f",
    "fused_planner": "#1e8f4e",
    "fused_profiled": "#86c95c",
    "fused_hot": "#e05d5d",
    "fused_hot_every_8": "#e88f8f",
    "fused_hot_batches": "#c44569",
    "fused_hot_batches_every_8": "#e07fb4",
    "fused_fp16": "#9ac43c",
    "fused_bf16": "#2fb3c9",
    "fused_int8": "#2a8a8a",
    "fused_dct": "#9a7bb5",
    "dedup_per_table": "#7f5f4f",
}
OF_ALLOCATORS = {"default": "#2fa866", "keep": "#4c8ef7", "jemalloc": "#a678de"}
DASHES = {"default": "solid", "keep": "dash", "jemalloc": "dot"}
STAGES = (
    *("#8f98a3", "#b07d62", "#b5a642", "#d9b44a", "#e0a0c0", "#f08c3a", "#4c8ef7", "#f5b27d"),
    *("#e05d5d", "#2fa866", "#86c95c", "#c44569", "#a678de", "#1f9e9e", "#6f7f8f"),
)
BOUND_COLORS = {"exchange": "#7a828c", "lookup": "#9aa2ac", "gather": "#bcc3ca"}
ROW = 34  # pixels of a bar with its gap


def figures_of(suites: Sequence[str]) -> list[WorkloadFigures]:
    """Returns the figures of all workloads that the suites have measured."""
    documents = (load_results(MEASURED / suite / RESULTS) for suite in suites)
    return [WorkloadFigures(result) for document in documents for result in document["results"]]


def _bars(rows: float, x_title: str, **layout: Any) -> dict[str, Any]:
    """Returns the layout of a chart of horizontal bars, of which the first is at the top."""
    base: dict[str, Any] = {
        "height": round(150 + ROW * rows),
        "margin": {"l": 10, "r": 30, "t": 10, "b": 50},
        "xaxis": {"title": {"text": x_title}, "automargin": True},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "legend": {
            **{"orientation": "h", "y": 1, "yanchor": "bottom"},
            **{"traceorder": "normal", "entrywidth": 130},
        },
    }
    return {**base, **layout}


def _line_at(value: float) -> list[dict[str, Any]]:
    """Returns a line across horizontal bars, where both sides are alike."""
    line = {"width": 1.5, "color": "#8f98a3"}
    return [
        {"type": "line", "x0": value, "x1": value, "yref": "paper", "y0": 0, "y1": 1, "line": line}
    ]


def speeds(suites: Sequence[str]) -> go.Figure:
    """Shows how many times shorter the fused step is than the best stock step."""
    workloads = [w for w in figures_of(suites) if w.speed_up is not None]
    figure = go.Figure()
    for allocator in allocators_of(workloads):
        chosen = [w for w in workloads if w.allocator == allocator]
        ratios = [w.speed_up for w in chosen if w.speed_up is not None]
        pattern = {"shape": "" if allocator == "default" else "/", "fillmode": "overlay"}
        figure.add_bar(
            name=ALLOCATOR_TITLES[allocator] or "default allocator",
            orientation="h",
            y=[w.title for w in chosen],
            x=[ratio.median for ratio in ratios],
            error_x={
                "type": "data",
                "array": [ratio.high - ratio.median for ratio in ratios],
                "arrayminus": [ratio.median - ratio.low for ratio in ratios],
                "thickness": 1.2,
                "width": 3,
            },
            marker={"color": OF_ALLOCATORS[allocator], "pattern": pattern},
            customdata=[_compared(w) for w in chosen],
            hovertemplate="%{y}<br><b>%{x:.2f}x</b><br>%{customdata}<extra></extra>",
        )
    rows = len(side_by_side(workloads)) * (1 + 0.4 * (len(figure.data) - 1))
    title = "step of the best stock sharding / fused step (line: 95 % interval)"
    figure.update_layout(_bars(rows, title, shapes=_line_at(1), barmode="group"))
    figure.update_xaxes(rangemode="tozero")
    return figure


def _compared(w: WorkloadFigures) -> str:
    assert w.best_stock is not None and w.fused is not None
    systems = (w.best_stock, w.fused)
    return "<br>".join(f"{system.name}: {system.milliseconds:.1f} ms" for system in systems)


def sent(suites: Sequence[str]) -> go.Figure:
    """Shows what each system sends in a step, and the least that the fused one could send."""
    groups = side_by_side(figures_of(suites))
    workloads = [next(iter(group.values())) for group in groups]  # whatever the allocator
    names = list(dict.fromkeys(name for w in workloads for name in w.systems))
    figure = go.Figure()
    for name in names:
        chosen = [w for w in workloads if name in w.systems]
        systems = [w.systems[name] for w in chosen]
        figure.add_bar(
            name=name,
            orientation="h",
            y=[w.title for w in chosen],
            x=[system.bytes_sent / 2**20 for system in systems],
            marker={"color": COLORS[name]},
            customdata=[
                "<br>".join(
                    f"{kind}: {human_bytes(system.bytes_by_kind[kind])}"
                    for kind in KINDS
                    if kind in system.bytes_by_kind
                )
                for system in systems
            ],
            hovertemplate="%{y}<br><b>"
            + name
            + ": %{x:.2f} MiB</b><br>%{customdata}<extra></extra>",
        )
    figure.add_scatter(
        name="least for fused",
        mode="markers",
        y=[w.title for w in workloads],
        x=[w.least_row_bytes / 2**20 for w in workloads],
        marker={"symbol": "diamond", "size": 11, "color": "#e05d5d"},
        hovertemplate="%{y}<br><b>least: %{x:.2f} MiB</b><extra></extra>",
    )
    title = "MiB on the wire in a step, all ranks (ideal collectives)"
    figure.update_layout(_bars(len(workloads) * (0.6 + 0.45 * len(names)), title, barmode="group"))
    figure.update_layout(margin_t=60)
    _log_axis(figure.layout.xaxis, title, [x for trace in figure.data for x in trace.x])
    return figure


def stages(suites: Sequence[str]) -> go.Figure:
    """Shows where the time of the fused step goes, and below it what it takes at least."""
    workloads = [w for w in figures_of(suites) if w.phases]
    names = [name for name in workloads[0].phases if name != "step"]
    names = [name for name in names if any(w.phases.get(name, 0) > 0 for w in workloads)]
    figure = go.Figure()
    labels = [w.label for w in workloads]
    for name, color in zip(names, STAGES, strict=False):
        values = [max(w.phases.get(name, 0.0), 0.0) for w in workloads]
        shares = [100 * v / w.phases["step"] for v, w in zip(values, workloads, strict=True)]
        _add_share(figure, name, labels, shares, values, color)
    for name, color in BOUND_COLORS.items():
        bounded = [w for w in workloads if name in w.bound_seconds]
        values = [1e3 * median(w.bound_seconds[name]) for w in bounded]
        shares = [100 * v / w.phases["step"] for v, w in zip(values, bounded, strict=True)]
        below = [f"least of {w.label}" for w in bounded]
        _add_share(figure, f"least: {name}", below, shares, values, color)
    order = [text for label in labels for text in (label, f"least of {label}")]
    layout = _bars(1.4 * len(workloads), "% of the fused step", barmode="stack", bargap=0.15)
    figure.update_layout(layout)
    # Only every second bar, the step itself, has a name.
    figure.update_yaxes(categoryorder="array", categoryarray=order, tickvals=labels)
    return figure


def _add_share(
    figure: go.Figure,
    name: str,
    labels: list[str],
    shares: list[float],
    values: list[float],
    color: str,
) -> None:
    figure.add_bar(
        name=name,
        orientation="h",
        y=labels,
        x=shares,
        marker={"color": color},
        customdata=values,
        hovertemplate="%{y}<br><b>"
        + name
        + ": %{customdata:.2f} ms</b>, %{x:.0f} %<extra></extra>",
    )


def predictions(suites: Sequence[str]) -> go.Figure:
    """Shows the predicted over the measured steps of all systems."""
    found: list[dict[str, Any]] = []
    for suite in suites:
        found += json.loads((MEASURED / suite / "validation.json").read_text())["comparisons"]
    figure = go.Figure()
    ends = [1e3 * end(c["seconds_measured"] for c in found) for end in (min, max)]
    for factor, name in ((1.0, "as measured"), (1.15, "15 % more, 15 % less"), (1 / 1.15, "")):
        figure.add_scatter(
            name=name,
            legendgroup="" if factor == 1 else "15 %",
            showlegend=bool(name),
            mode="lines",
            x=ends,
            y=[factor * end for end in ends],
            line={"color": "#8f98a3", "width": 1.2, "dash": "solid" if factor == 1 else "dot"},
            hoverinfo="skip",
        )
    for name in dict.fromkeys(c["system"] for c in found):
        chosen = [c for c in found if c["system"] == name]
        figure.add_scatter(
            name=name,
            mode="markers",
            x=[1e3 * c["seconds_measured"] for c in chosen],
            y=[1e3 * c["seconds_predicted"] for c in chosen],
            marker={"color": COLORS[name], "size": 8},
            customdata=[c["workload"] for c in chosen],
            hovertemplate="%{customdata}<br><b>"
            + name
            + "</b><br>measured %{x:.1f} ms<br>predicted %{y:.1f} ms<extra></extra>",
        )
    figure.update_layout(height=560, margin={"l": 10, "r": 10, "t": 10, "b": 50})
    _log_axis(figure.layout.xaxis, "measured, ms", [x for t in figure.data for x in t.x])
    _log_axis(figure.layout.yaxis, "predicted, ms", [y for t in figure.data for y in t.y])
    return figure


def _log_axis(axis: Any, title: str, values: Sequence[float]) -> None:
    """Makes an axis logarithmic, with labels such as 20, 50, 100, fewer of them if it is long."""
    first, last = floor(log10(min(values))), ceil(log10(max(values)))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    texts = [f"{tick:,.10g}" for tick in ticks]
    axis.update(type="log", tickvals=ticks, ticktext=texts, title={"text": title}, automargin=True)


def growth(suites: Sequence[str]) -> go.Figure:
    """Shows how steps and bytes grow with what each series of workloads sweeps."""
    series: dict[str, list[WorkloadFigures]] = {}
    for w in figures_of(suites):
        if len(w.config.sweep) == 1:
            series.setdefault(w.config.series, []).append(w)
    figure = make_subplots(
        rows=2,
        cols=len(series),
        subplot_titles=list(series),
        shared_xaxes=True,
        vertical_spacing=0.06,
    )
    shown: set[str] = set()
    for column, workloads in enumerate(series.values(), start=1):
        for trace in _growth_lines(workloads):
            for row, values in ((1, trace["milliseconds"]), (2, trace["mib"])):
                name, unit = trace["name"], "ms" if row == 1 else "MiB"
                figure.add_scatter(
                    name=name,
                    legendgroup=name,
                    showlegend=name not in shown,
                    x=trace["swept"],
                    y=values,
                    line={"color": trace["color"], "dash": trace["dash"], "width": 1.8},
                    hovertemplate=f"%{{x}}<br><b>{name}: %{{y:.1f}} {unit}</b><extra></extra>",
                    row=row,
                    col=column,
                )
                shown.add(name)
        swept = [next(iter(w.config.sweep.values()))[0] for w in workloads]
        figure.update_xaxes(type="log", tickvals=swept, ticktext=swept, col=column)
        figure.update_xaxes(title_text=next(iter(workloads[0].config.sweep)), row=2, col=column)
    for row, title in ((1, "ms of a step"), (2, "MiB on the wire")):
        for column in range(1, len(series) + 1):
            (axis,) = figure.select_yaxes(row=row, col=column)
            values = [y for t in figure.select_traces(row=row, col=column) for y in t.y]
            _log_axis(axis, title if column == 1 else "", values)
    legend = {"orientation": "h", "y": -0.16}
    figure.update_layout(height=640, legend=legend, margin={"l": 10, "r": 10, "t": 30, "b": 10})
    return figure


def _growth_lines(workloads: Sequence[WorkloadFigures]) -> Iterator[dict[str, Any]]:
    """Yields a line for each system and allocator: what is swept, milliseconds and MiB."""
    names = list(dict.fromkeys(name for w in workloads for name in w.systems))
    for name in names:
        for allocator in allocators_of(workloads):
            own = [w for w in workloads if name in w.systems and w.allocator == allocator]
            title = ALLOCATOR_TITLES[allocator]
            yield {
                "name": f"{name}, {title}" if title else name,
                "swept": [next(iter(w.config.sweep.values()))[0] for w in own],
                "milliseconds": [w.systems[name].milliseconds for w in own],
                "mib": [w.systems[name].bytes_sent / 2**20 for w in own],
                "color": COLORS[name],
                "dash": DASHES[allocator],
            }


def scaling(scenarios: Sequence[str]) -> go.Figure:
    """Shows the simulated throughput, and how much of it a rank keeps as the cluster grows."""
    (scenario,) = scenarios
    points = json.loads((MEASURED / "scaling" / f"{scenario}.json").read_text())["points"]
    systems = list(dict.fromkeys(p["system"] for p in points))
    colors = ("#8f98a3", "#4fc78a", "#e0a93a", "#4c8ef7", "#e05d5d", "#a678de")
    figure = make_subplots(cols=2, subplot_titles=("throughput", "what a rank keeps of it"))
    for system, color in zip(systems, colors, strict=True):
        own = [p for p in points if p["system"] == system and p["seconds"]]
        ranks = [p["ranks"] for p in own]
        throughput = [p["ranks"] * p["batch"] / p["seconds"] for p in own]
        of_a_rank = [t / r for t, r in zip(throughput, ranks, strict=True)]
        shares = [100 * value / of_a_rank[0] for value in of_a_rank]
        units = ("M samples a second", "%")
        for column, values in enumerate(([t / 1e6 for t in throughput], shares), start=1):
            figure.add_scatter(
                name=system,
                legendgroup=system,
                showlegend=column == 1,
                x=ranks,
                y=values,
                # Hot rows are often as fast as none.
                line={"color": color, "dash": "dash" if "+ hot" in system else "solid"},
                customdata=[p["how"] for p in own],
                hovertemplate=f"%{{x}} ranks<br><b>{system}: %{{y:.3g}} {units[column - 1]}</b>"
                "<br>%{customdata}<extra></extra>",
                row=1,
                col=column,
            )
    sizes = sorted({p["ranks"] for p in points})
    figure.update_xaxes(type="log", tickvals=sizes, ticktext=sizes, title_text="ranks")
    throughputs = [y for trace in figure.data[::2] for y in trace.y]
    _log_axis(figure.layout.yaxis, "million samples a second", throughputs)
    figure.layout.yaxis2.update(rangemode="tozero", ticksuffix=" %", automargin=True)
    legend = {"orientation": "h", "y": -0.2}
    figure.update_layout(height=460, legend=legend, margin={"l": 10, "r": 10, "t": 30, "b": 10})
    return figure


def hits(suites: Sequence[str]) -> go.Figure:
    """Shows hit rates by the size of the hot set; links and numbers of ranks hardly matter."""
    figure = go.Figure()
    seen: set[tuple[tuple[float, float], ...]] = set()
    for w in figures_of(suites):
        rates = tuple(w.hits.values())
        if not rates or rates in seen or w.config.batches != "all" or w.config.ranks != 2:
            continue
        color = STAGES[(5 + len(seen)) % len(STAGES)]
        seen.add(rates)
        for of, share in (("rows", 0), ("ids", 1)):
            figure.add_scatter(
                name=f"{w.title}: of its {of}",
                x=list(w.hits),
                y=[100 * rate[share] for rate in rates],
                line={"color": color, "dash": "solid" if share == 0 else "dot"},
                hovertemplate=f"{w.title}<br>%{{x}} hot rows<br><b>%{{y:.1f}} % of {of}</b>"
                "<extra></extra>",
            )
    legend = {"orientation": "h", "y": -0.2}
    figure.update_layout(height=560, legend=legend, margin={"l": 10, "r": 10, "t": 10, "b": 10})
    _log_axis(figure.layout.xaxis, "hot rows", [x for trace in figure.data for x in trace.x])
    figure.update_yaxes(title_text="hot, % of a batch", rangemode="tozero", automargin=True)
    return figure


def codecs(suites: Sequence[str]) -> go.Figure:
    """Shows the time of steps with codecs in units of the step without."""
    workloads = figures_of(suites)
    figure = go.Figure()
    for name in CODEC_SYSTEMS:
        chosen = [w for w in workloads if name in w.systems]
        ratios = [w.systems[name].against_fused for w in chosen]
        figure.add_bar(
            name=name.removeprefix("fused_"),
            orientation="h",
            y=[w.label for w in chosen],
            x=[ratio.median for ratio in ratios if ratio is not None],
            error_x={
                "type": "data",
                "array": [ratio.high - ratio.median for ratio in ratios if ratio is not None],
                "arrayminus": [ratio.median - ratio.low for ratio in ratios if ratio is not None],
                "thickness": 1,
                "width": 2,
            },
            marker={"color": COLORS[name]},
            customdata=[w.row_bytes / max(w.row_bytes_of(name), 1) for w in chosen],
            hovertemplate="%{y}<br><b>%{x:.2f} of the step</b><br>"
            "%{customdata:.2f} times fewer bytes<extra>" + name + "</extra>",
        )
    title = "step with the codec / step without (line: 95 % interval)"
    rows = len(workloads) * (0.6 + 0.4 * len(CODEC_SYSTEMS))
    figure.update_layout(_bars(rows, title, shapes=_line_at(1), barmode="group"))
    return figure


CHARTS: dict[str, Callable[[Sequence[str]], go.Figure]] = {
    "speeds": speeds,
    "bytes": sent,
    "stages": stages,
    "predictions": predictions,
    "growth": growth,
    "scaling": scaling,
    "hits": hits,
    "codecs": codecs,
}


def chart(kind: str, suites: str) -> go.Figure:
    """Returns the chart that a mark asks for.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in CHARTS:
        raise ValueError(f"plot {kind} of {suites}: must be one of {', '.join(CHARTS)}")
    return CHARTS[kind](suites.split(" and "))


def json_of(figure: go.Figure) -> str:
    """Returns a chart as JSON that may stand in a page, without plotly's own look."""
    plain = figure.to_plotly_json()
    plain["layout"].pop("template", None)
    return json.dumps(plain).replace("</", "<\\/")
