"""Pictures for the terminal."""

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from fusedrec_torchrec.training.run_folder import locked
from fusedrec_torchrec.watch import live
from fusedrec_torchrec.watch.document import document_of
from fusedrec_torchrec.watch.frame import duration, frame_of
from fusedrec_torchrec.watch.plots import bar, curves, written
from fusedrec_torchrec.watch.run import open_runs
from tests.watch.runs import record, text_of, whole_run, write_run


def picture(*folders: Path, width: int = 120, height: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(frame_of(document_of(open_runs(folders)), width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_frame_has_all_figures_with_titles_and_units(tmp_path: Path) -> None:
    shown = picture(whole_run(tmp_path / "tiny", skipped_steps=2))
    for part in (
        *("tiny", "finished", "50 of 50", "fused_row_wise", "1,000", "0.6500", "0.7500"),
        *("Log loss", "nats", "Throughput", "samples/s", "Hit rate", "25.0 %", "Skipped steps"),
        *("Bytes by collective", "all to all", "3.9 KiB", "all reduce", "Load of ranks", "rank 1"),
        *("Stages of a step", "lookup", "1.50", "Busiest rank", "1.5000"),
    ):
        assert part in shown, part
    assert max(map(len, shown.splitlines())) <= 120


def test_several_runs_are_side_by_side(tmp_path: Path) -> None:
    one, other = whole_run(tmp_path / "one"), whole_run(tmp_path / "other", log_loss=0.5)
    shown = picture(one, other)
    assert "one" in shown and "other" in shown
    assert "0.6500 / 0.6600  0.5000 / 0.6600" in shown
    assert shown.count("100") >= 2  # the load of the second rank, of both


def test_a_small_window_shows_less_and_says_so(tmp_path: Path) -> None:
    folder = whole_run(tmp_path)
    shown = picture(folder, width=80, height=24)
    assert len(shown.splitlines()) <= 24 and "Log loss" in shown
    assert "more: in a larger window, with --once or with --web" in shown
    assert max(map(len, picture(folder, width=40).splitlines())) <= 40


def test_without_records_it_says_when_they_come(tmp_path: Path) -> None:
    shown = picture(write_run(tmp_path, []))
    assert "waiting" in shown and "the first comes after logging.log_every steps" in shown


def test_curves_go_from_corner_to_corner() -> None:
    rising = curves([([(0, 0.0), (10, 1.0)], "blue", True)], 10, 3).plain.splitlines()
    assert len(rising) == 3 and all(len(line) == 10 for line in rising)
    assert rising[0][-1] != " " and rising[2][0] != " "
    assert rising[0][0] == rising[2][-1] == " "
    assert curves([], 4, 2).plain == "\n"
    assert curves([([(5, 2.0)], "blue", True)], 5, 1).plain.strip()  # one point is shown


@pytest.mark.parametrize(
    ("share", "drawn"), [(0.0, "    "), (0.5, "██  "), (1.0, "████"), (2.0, "████"), (1e-9, "▏   ")]
)
def test_bars(share: float, drawn: str) -> None:
    assert bar(share, 4) == drawn


def test_values_are_written_as_people_read_them() -> None:
    assert written(None, "number") == "-"
    assert written(0.12345, "number") == "0.1235" and written(0.0001236, "number") == "0.0001236"
    assert written(0.256, "percent") == "25.6 %" and written(2048, "bytes") == "2.0 KiB"
    assert written(112626.4, "count") == "112,626"
    times = [duration(seconds) for seconds in (42, 200, 7500, 273_600)]
    assert times == ["42 s", "3 min 20 s", "2 h 5 min", "3 d 4 h"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_live_view_follows_a_run_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look comes after more was written; the last picture stays."""
    write_run(tmp_path / "run", [record(10)])
    console = Console(file=Terminal(), width=100, height=40, force_terminal=True)
    looks = []

    def train_on(_: float) -> None:
        looks.append(1)
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write(text_of([record(10 * len(looks) + 10)]))
        if len(looks) == 4:
            (tmp_path / "run" / "summary.json").write_text('{"steps": 50}')

    monkeypatch.setattr(time, "sleep", train_on)
    live.watch_live(open_runs([tmp_path / "run"]), 2.0, console)
    assert len(looks) == 4
    assert isinstance(console.file, Terminal)
    shown = console.file.getvalue()
    assert "20 of 50" in shown and "finished" in shown.rpartition("50 of 50")[0]


def test_an_interrupt_ends_the_live_view_and_leaves_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    console = Console(file=Terminal(), width=100, height=40, force_terminal=True)
    with locked(write_run(tmp_path, [record(10)])):
        live.watch_live(open_runs([tmp_path]), 2.0, console)
    assert isinstance(console.file, Terminal) and "Log loss" in console.file.getvalue()
