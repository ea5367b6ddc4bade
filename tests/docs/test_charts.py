"""The charts of the site show what was measured, and are where pages ask for them."""

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, get_args

import pytest

from fusedrec_torchrec.bench.suite import OURS, SYSTEMS
from fusedrec_torchrec.planner.simulate import SYSTEMS as SIMULATED

ROOT = Path(__file__).parents[2]
DOCS, MEASURED = ROOT / "docs", ROOT / "benchmarks" / "results"
MARKS = [
    (page.name, *mark)
    for page in sorted(DOCS.glob("*.md"))
    for mark in re.findall(r"<!-- plot (.*?) of (.*?) -->", page.read_text())
]


@pytest.fixture(scope="module")
def pages() -> Iterator[ModuleType]:
    """The module ``docs/charts_in_pages.py``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        yield importlib.import_module("charts_in_pages")


@pytest.fixture(scope="module")
def charts(pages: ModuleType) -> Any:
    """The module ``docs/charts.py``."""
    return importlib.import_module("charts")


def results_of(suite: str) -> list[dict[str, Any]]:
    found = json.loads((MEASURED / suite / "results.json").read_text())["results"]
    assert found
    return list(found)


def label(result: dict[str, Any]) -> str:
    """Returns the name of a workload as charts have it, without the allocator."""
    workload = result["workload"]
    link = "" if "link" in workload["sweep"] else workload["link"]
    return ", ".join(filter(None, (workload["name"], link)))


def allocator_of(trace: Any) -> str:
    return "keep" if "memory kept" in trace.name else "default"


def points(trace: Any) -> dict[Any, float]:
    """Returns what a trace of horizontal bars has for each of its labels."""
    assert len(set(trace.y)) == len(trace.y), "two bars in one place"
    return dict(zip(trace.y, trace.x, strict=True))


def test_pages_ask_for_charts_of_every_kind(charts: Any) -> None:
    assert {kind for _, kind, _ in MARKS} == set(charts.CHARTS)
    assert len(MARKS) >= 12


@pytest.mark.parametrize("mark", MARKS, ids=lambda mark: " ".join(mark))
def test_a_page_gets_the_chart_that_it_asks_for(pages: ModuleType, mark: tuple[str, ...]) -> None:
    _, kind, suites = mark
    markdown = pages.with_places(
        f"Text.\n\n<!-- plot {kind} of {suites} -->\n![A](a.png)\n\nMore.\n"
    )
    assert "<!--" not in markdown and "\n\n![A](a.png)\n" in markdown
    image = '<p><img alt="A" src="a.png" /></p>'
    place = f'<div class="chart" data-plot="{kind} of {suites}"></div>'
    assert place in markdown
    page = pages.with_charts(f"<p>Text.</p>\n{place}\n{image}\n<p>More.</p>")
    assert f"<noscript>{image}</noscript>" in page and page.count("<img") == 1
    (text,) = re.findall('<script type="application/json">(.*?)</script>', page, re.DOTALL)
    drawn = json.loads(text, parse_constant=pytest.fail)  # no NaN, which browsers do not read
    assert drawn["data"] and all(len(trace["x"]) > 0 for trace in drawn["data"])
    assert "http" not in page, "something would be fetched"


def test_a_chart_without_an_image_leaves_what_follows_alone(pages: ModuleType) -> None:
    page = pages.with_charts(
        '<div class="chart" data-plot="codecs of compression"></div>\n<p>Text.</p>'
    )
    assert page.endswith("<noscript></noscript></figure><p>Text.</p>")


def test_an_unknown_kind_of_chart_is_an_error(charts: Any) -> None:
    with pytest.raises(ValueError, match="plot speed of mlperf: must be one of speeds, bytes"):
        charts.chart("speed", "mlperf")


def test_all_systems_have_colours_of_their_own(charts: Any) -> None:
    assert set(charts.COLORS) == set(SYSTEMS)
    assert len(set(charts.COLORS.values())) == len(SYSTEMS)
    allocators = get_args(importlib.import_module("fusedrec_torchrec.bench.allocators").Allocator)
    assert set(charts.OF_ALLOCATORS) == set(charts.DASHES) == set(allocators)


@pytest.mark.parametrize("suite", ["mlperf", "targets", "crossover", "workloads"])
def test_speed_ups_are_ratios_of_what_was_measured(charts: Any, suite: str) -> None:
    shown = {
        (name, allocator_of(trace)): value
        for trace in charts.chart("speeds", suite).data
        for name, value in points(trace).items()
    }
    expected = {}
    for result in results_of(suite):
        seconds = result["measured"]["seconds"]
        fused = seconds["fused_planner" if "fused_planner" in seconds else "fused_row_wise"]
        stock = min((times for name, times in seconds.items() if name not in OURS), key=median)
        ratio = median(s / f for s, f in zip(stock, fused, strict=True))
        expected[label(result), result.get("allocator", "default")] = ratio
    assert shown == pytest.approx(expected)


def test_intervals_hold_the_ratios(charts: Any) -> None:
    for trace in charts.chart("speeds", "targets and links").data:
        assert all(width >= 0 for width in (*trace.error_x.array, *trace.error_x.arrayminus))
        least = [x - below for x, below in zip(trace.x, trace.error_x.arrayminus, strict=True)]
        assert min(least) > 0 and any(trace.error_x.array)


@pytest.mark.parametrize("suite", ["mlperf", "targets"])
def test_bytes_are_those_that_were_counted(charts: Any, suite: str) -> None:
    *systems, least = charts.chart("bytes", suite).data
    shown = {(trace.name, name): x for trace in systems for name, x in points(trace).items()}
    expected = {
        (system, label(result)): sum(c["bytes_sent"] for rank in ranks for c in rank) / 2**20
        for result in results_of(suite)
        for system, ranks in result["measured"]["wire"].items()
    }
    assert shown == pytest.approx(expected)
    bounds = {
        label(result): 2 * result["measured"]["unique_remote_bytes"] / 2**20
        for result in results_of(suite)
    }
    assert points(least) == pytest.approx(bounds)


def test_stages_are_shares_of_the_step(charts: Any) -> None:
    figure = charts.chart("stages", "mlperf")
    by_name = {trace.name: trace for trace in figure.data}
    results = results_of("mlperf")
    for stage in ("lookup", "gradients", "other"):
        expected = [1e3 * result["measured"]["phases"][stage] for result in results]
        assert list(by_name[stage].customdata) == pytest.approx(expected)
    stages = [trace for trace in figure.data if not trace.name.startswith("least: ")]
    for bar, _ in enumerate(results):
        assert sum(trace.x[bar] for trace in stages) == pytest.approx(100, abs=2)
    assert {"least: exchange", "least: lookup", "least: gather"} <= set(by_name)


def test_predictions_are_those_of_the_validation(charts: Any) -> None:
    stored = json.loads((MEASURED / "planner" / "validation.json").read_text())["comparisons"]
    shown = {
        (trace.name, workload): (x, y)
        for trace in charts.chart("predictions", "planner").data
        if trace.mode == "markers"
        for workload, x, y in zip(trace.customdata, trace.x, trace.y, strict=True)
    }
    assert len(shown) == len(stored)
    for c in stored:
        times = [1e3 * c["seconds_measured"], 1e3 * c["seconds_predicted"]]
        assert shown[c["system"], c["workload"]] == pytest.approx(times)


def test_growth_has_a_line_for_each_system_of_a_series(charts: Any) -> None:
    figure = charts.chart("growth", "growth")
    shown = {
        (trace.name.partition(",")[0], allocator_of(trace), trace.xaxis, x): y
        for trace in figure.data
        if trace.xaxis in ("x", "x2", "x3")
        for x, y in zip(trace.x, trace.y, strict=True)
    }
    series = list(dict.fromkeys(result["workload"]["series"] for result in results_of("growth")))
    axes = dict(zip(series, ("x", "x2", "x3"), strict=True))
    expected = {}
    for result in results_of("growth"):
        ((swept,),) = result["workload"]["sweep"].values()
        axis, allocator = axes[result["workload"]["series"]], result.get("allocator", "default")
        for name, seconds in result["measured"]["seconds"].items():
            expected[name, allocator, axis, swept] = 1e3 * median(seconds)
    assert shown == pytest.approx(expected)
    assert len(figure.data) % 2 == 0  # as many lines of bytes


@pytest.mark.parametrize("scenario", ["fusedrec", "groups", "hot"])
def test_scaling_is_what_was_simulated(charts: Any, scenario: str) -> None:
    stored = json.loads((MEASURED / "scaling" / f"{scenario}.json").read_text())["points"]
    traces = charts.chart("scaling", scenario).data
    assert [trace.name for trace in traces[::2]] == list(SIMULATED)
    for throughput, kept in zip(traces[::2], traces[1::2], strict=True):
        own = [p for p in stored if p["system"] == throughput.name and p["seconds"]]
        assert list(throughput.x) == [p["ranks"] for p in own]
        samples = [p["ranks"] * p["batch"] / p["seconds"] / 1e6 for p in own]
        assert list(throughput.y) == pytest.approx(samples)
        first = own[0]["batch"] / own[0]["seconds"]
        shares = [100 * p["batch"] / p["seconds"] / first for p in own]
        assert list(kept.y) == pytest.approx(shares)


def test_hit_rates_and_codecs_are_those_of_the_measurements(charts: Any) -> None:
    owners = results_of("hot")[0]["measured"]["owners"]
    rows, ids = charts.chart("hits", "hot").data[:2]
    assert list(rows.x) == [int(size) for size in owners["hits"]]
    for trace, share in ((rows, 0), (ids, 1)):
        expected = [100 * hit[share] / owners["totals"][share] for hit in owners["hits"].values()]
        assert list(trace.y) == pytest.approx(expected)
    results = results_of("compression")
    for trace in charts.chart("codecs", "compression").data:
        for name, shown in points(trace).items():
            (result,) = (r for r in results if label(r) == name)
            seconds = result["measured"]["seconds"]
            pairs = zip(seconds[f"fused_{trace.name}"], seconds["fused_row_wise"], strict=True)
            assert shown == pytest.approx(median(coded / plain for coded, plain in pairs))


def test_the_site_loads_plotly_from_itself() -> None:
    from plotly.offline import get_plotlyjs

    script = (DOCS / "javascripts" / "charts.js").read_text()
    assert 'new URL("plotly.min.js", document.currentScript.src)' in script
    assert "http" not in script and len(get_plotlyjs()) > 1_000_000
    assert "docs/charts_hook.py" in (ROOT / "mkdocs.yml").read_text()
