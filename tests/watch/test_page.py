"""The page in a real browser, without a window."""

import re
from pathlib import Path

from tests.watch.runs import record, whole_run, write_run
from tests.watch.serving import browse, needs_browser, served

pytestmark = needs_browser


def page_of(*folders: Path) -> str:
    """The page as the browser has it when its script has run."""
    with served(*folders) as server:
        page = browse("--dump-dom", server.url)
    assert 'data-drawn="yes"' in page and "data-error" not in page
    return page


def panel(page: str, name: str) -> str:
    found = re.search(rf'<article id="{name}">.*?</article>', page, re.DOTALL)
    assert found, name
    return found.group()


def test_a_finished_run_is_drawn_with_titles_units_and_values(tmp_path: Path) -> None:
    page = page_of(whole_run(tmp_path / "tiny", skipped_steps=2))
    assert "<title>tiny · fusedrec watch</title>" in page and "all runs have ended" in page
    assert "step 50 of 50 · 2 ranks · fused_row_wise · batch 100 · skipped steps 2" in page
    loss = panel(page, "panel-log_loss")
    assert "Log loss" in loss and "nats" in loss
    assert "0.6500" in loss and "0.6600 held-out" in loss
    assert re.search(r'<polyline class="line paint-0" points="([\d.]+,[\d.]+ ?){5}"', loss)
    assert loss.count("<circle") == 1  # the evaluation
    assert "1,000" in panel(page, "panel-samples_per_second")
    assert "25 %" in panel(page, "panel-hot_share_of_rows")
    assert "2" in panel(page, "panel-skipped_steps")
    sent = panel(page, "bytes")
    assert "all to all" in sent and "3.9 KiB in 3" in sent and "1000 B in 1" in sent
    load = panel(page, "load")
    assert load.count("<rect") == 2 and "rank 0: 300" in load and "rank 1: 100" in load
    stages = panel(page, "stages")
    assert "lookup" in stages and "1.50 ms  30 %" in stages
    assert "Not recorded: " in page and "Calibration" in page


def test_curves_lie_inside_of_their_plots(tmp_path: Path) -> None:
    page = page_of(whole_run(tmp_path, log_loss=1e-7, samples_per_second=3.2e8))
    lines = re.findall(r'<polyline class="line[^"]*" points="([^"]+)"', page)
    points = [tuple(map(float, point.split(","))) for line in lines for point in line.split()]
    assert len(lines) > 5
    assert all(46 <= x <= 332 and 8 <= y <= 130 for x, y in points)


def test_several_runs_have_colours_of_their_own(tmp_path: Path) -> None:
    page = page_of(whole_run(tmp_path / "one"), whole_run(tmp_path / "other", log_loss=0.5))
    assert page.count('class="run paint-') == 2 and 'data-run="other"' in page
    loss = panel(page, "panel-log_loss")
    assert "line paint-0" in loss and "line paint-1" in loss and "0.5000" in loss
    assert panel(page, "load").count("<polygon") == 2


def test_a_run_that_trains_and_one_without_records(tmp_path: Path) -> None:
    running = write_run(tmp_path / "running", [record(10)])
    with (running / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "kind": "tr')  # is being written
    page = page_of(running, write_run(tmp_path / "fresh", []))
    assert "live, every 2 s" in page and "4 s left" in page
    assert "no records yet: the first comes after logging.log_every steps" in page


def test_names_are_text_and_no_markup(tmp_path: Path) -> None:
    page = page_of(whole_run(tmp_path / "<b>bold<script>alert(1)<"))
    assert "&lt;b&gt;bold&lt;script&gt;" in page and "<b>bold" not in page


def test_a_picture_can_be_taken(tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    with served(whole_run(tmp_path / "tiny")) as server:
        browse(f"--screenshot={picture}", "--window-size=1200,900", server.url)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
