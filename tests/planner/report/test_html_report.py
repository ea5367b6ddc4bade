"""The HTML report: self-contained, and alive in a browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusedrec_torchrec.planner.cost.cluster import ClusterConfig, LinkConfig, RatesConfig
from fusedrec_torchrec.planner.report.explain import Explanation
from fusedrec_torchrec.planner.report.html_report import write_report
from fusedrec_torchrec.planner.search.decide import decide
from fusedrec_torchrec.planner.search.search_config import SearchConfig
from tests.planner.search.test_decide import profiled, quick, table

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PLOTS = ["breakdown", "load", "coverage", "what-if-0", "what-if-1", "what-if-2", "what-if-3"]
# Looks at the page as a reader would, and moves each slider to its ends.
LOOK = """
<script>
window.onerror = (text) => { document.title = 'error: ' + text; };
window.addEventListener('load', async () => {
  const found = {};
  for (const name of PLOTS) {
    const plot = document.getElementById(name);
    const bars = () => plot.querySelectorAll('.bars .point, .scatterlayer .trace').length;
    const title = () => (plot.querySelector('.gtitle') || {}).textContent;
    found[name] = {drawn: bars(), width: plot.getBoundingClientRect().width, titles: []};
    const slider = plot.layout.sliders && plot.layout.sliders[0];
    for (const step of slider ? slider.steps : []) {
      await Plotly.update(plot, ...step.args);
      found[name].titles.push(title());
    }
  }
  const result = document.createElement('script');
  result.type = 'application/json'; result.id = 'found';
  result.textContent = JSON.stringify(found);
  document.body.appendChild(result);
});
</script>
""".replace("PLOTS", json.dumps(PLOTS))


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    counts = (1e6 / np.arange(1, 3001) ** 1.3).astype(np.int64)
    tables = [profiled(f"<table {t}>", counts) for t in range(3)]
    tables.append(table("long", 10**6, pooling=50.0))
    link = LinkConfig(all_to_all=1.0, all_reduce=20.0, latency=5.0)
    cluster: ClusterConfig = quick(4, within_node=link, fused=RatesConfig(step=50.0, hot=1000.0))
    search = SearchConfig()
    return Explanation(decide(tables, 512, cluster, search), search)


@pytest.fixture(scope="module")
def report(explanation: Explanation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, explanation)
    return path


def test_it_needs_nothing_else(report: Path) -> None:
    text = report.read_text()
    assert not re.search(r"""<(script|link|img|iframe)[^>]*\b(src|href)=""", text)
    assert "<table 0>" not in text and "&lt;table 0&gt;" in text  # names are not markup
    for heading in ("What limits:", "What would help:", "What if: memory for hot rows", "long"):
        assert heading in text


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt install chromium)")
def test_it_is_alive_in_a_browser(report: Path, tmp_path: Path) -> None:
    page = tmp_path / "looked_at.html"
    page.write_text(report.read_text().replace("</body>", LOOK + "</body>"))
    found = in_browser(page)
    for name in PLOTS:
        assert found[name]["drawn"] > 0, name
        assert found[name]["width"] > 400, name
    for name in (name for name in PLOTS if name.startswith("what-if")):
        titles = found[name]["titles"]
        assert len(titles) > 2 and all("ms a step" in title for title in titles)
        assert len(set(titles)) > 1, name  # something happens
    assert any("hot rows" in title for title in found["what-if-0"]["titles"])


@pytest.mark.parametrize(("ranks", "ticks"), [(2, [0, 1]), (64, list(range(0, 64, 4)))])
def test_ranks_are_whole_numbers(tmp_path: Path, ranks: int, ticks: list[int]) -> None:
    search = SearchConfig()
    decision = decide([table("a", 10**5)], 512, quick(ranks), search)
    write_report(tmp_path / "report.html", Explanation(decision, search))
    plots = (tmp_path / "report.html").read_text().partition('id="load"')[2]
    values = re.search(r'"tickvals":(\[[\d,]*\])', plots.partition('id="coverage"')[0])
    assert values is not None and json.loads(values[1]) == ticks


def test_a_table_that_is_data_parallel_is_marked_with_its_price(tmp_path: Path) -> None:
    search = SearchConfig(tables={"small": ["data_parallel"]})
    tables = [table("small", 50), table("large", 10**6)]
    explanation = Explanation(decide(tables, 512, quick(4), search), search)
    assert explanation.decision.systems[0] == "data_parallel"
    price, usual = explanation.price(0, "data_parallel"), explanation.price(1, "data_parallel")
    assert price is not None and usual is not None and 0 < price < usual
    write_report(tmp_path / "report.html", explanation)
    text = (tmp_path / "report.html").read_text()
    assert "<th>data parallel</th>" in text
    assert f"<td class=chosen>{1e3 * price:.3g}</td><td>data_parallel: " in text


def in_browser(page: Path) -> dict[str, Any]:
    """What the page found out about itself; whatever it logs as an error fails."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,2400"]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--virtual-time-budget=20000"]
    command += ["--enable-logging=stderr", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "rror" in line]
    assert not errors, errors
    assert "<title>error" not in done.stdout
    match = re.search(r'id="found">(.*?)</script>', done.stdout, re.DOTALL)
    assert match, "the page did not come to its end"
    found: dict[str, Any] = json.loads(match[1])
    return found


def test_advice_and_limit_are_told(explanation: Explanation) -> None:
    advice = explanation.advice()
    assert advice
    assert [each.saves for each in advice] == sorted((a.saves for a in advice), reverse=True)
    assert all(0.01 <= each.saves < 1 for each in advice)
    assert re.fullmatch(r".+, \d+% of the step", explanation.limit())
    assert explanation.price(0, "column_wise") is not None
    names = list(explanation.alternatives)
    assert names[0] == "this plan" and "without hot rows" in names and "all row_wise" in names
    assert all(
        each.seconds >= 0.999 * explanation.decision.seconds
        for each in explanation.alternatives.values()
    )
