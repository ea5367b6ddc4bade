"""Makes plain data of runs: what the terminal, the page and ``--json`` show."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from fusedrec_torchrec.watch.panels import PANELS, is_number, value_of
from fusedrec_torchrec.watch.run import WatchedRun

__all__ = ["document_of", "thinned"]

VERSION = 1
MOST_POINTS = 400  # of a curve: more cannot be told apart
STAGE_RECORDS = 5  # the last ones, whose mean is shown
PER_STEP, BYTES_PER_STEP = "_per_step", "_bytes_per_step"
TOTALS = ("collectives_per_step", "bytes_sent_per_step")
Points = list[tuple[int, float]]


def document_of(runs: Sequence[WatchedRun]) -> dict[str, Any]:
    """Reads what is new of runs, and returns all that there is to show of them.

    Returns:
        ``version`` of this form; ``panels`` that any run has figures for, see ``Panel``;
        ``missing``, titles of the others; and ``runs``, see ``run_of``.
    """
    for run in runs:
        run.refresh()
    shown = [run_of(run) for run in runs]
    drawn = {key for run in shown for key, curves in run["curves"].items() if any(curves.values())}
    return {
        "version": VERSION,
        "panels": [asdict(panel) for panel in PANELS if panel.key in drawn],
        "missing": [panel.title for panel in PANELS if panel.key not in drawn],
        "runs": shown,
    }


def run_of(run: WatchedRun) -> dict[str, Any]:
    """Returns what there is to show of one run; what is not known is None or empty.

    ``curves`` has (step, value) points of training and of evaluations by the keys of panels,
    ``latest`` the last value of each.  Bytes and loads are those of the last record that has any,
    the milliseconds of stages a mean of the last few.
    """
    train = [record for record in run.records if record["kind"] == "train"]
    curves = {
        panel.key: {
            kind: thinned(_points(run.records, panel.key, kind)) for kind in ("train", "eval")
        }
        for panel in PANELS
    }
    traffic = _last(train, lambda record: TOTALS[1] in record) or {}
    collectives, sent = _by_collective(traffic)
    return {
        "name": run.name,
        "path": str(run.folder),
        "state": run.state,
        "step": run.step,
        "steps": run.steps,
        "remaining_seconds": run.remaining_seconds,
        **run.about(),
        "skipped_steps": (train[-1].get("skipped_steps") or 0) if train else 0,
        "failed_saves": (train[-1].get("failed_saves") or 0) if train else 0,
        "damaged_lines": run.damaged,
        "latest": {
            key: {kind: points[-1][1] for kind, points in of_key.items() if points}
            for key, of_key in curves.items()
            if any(of_key.values())
        },
        "collectives_per_step": collectives,
        "bytes_by_collective": sent,
        "rows_by_rank": _latest_list(train, "rows_looked_up_by_rank"),
        "bytes_by_rank": _latest_list(train, "bytes_sent_by_rank"),
        "stage_ms": _mean_stages(train),
        "curves": curves,
    }


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """Returns about ``most`` of the points: of each stretch the lowest and the highest.

    The last point stays, since it is the latest.
    """
    if len(points) <= most:
        return points
    size = 2 * len(points) / most
    kept = {points[-1]}
    for number in range(most // 2):
        stretch = points[int(number * size) : int((number + 1) * size)]
        kept |= {min(stretch, key=_value), max(stretch, key=_value)}
    return sorted(kept)


def _value(point: tuple[int, float]) -> float:
    return point[1]


def _points(records: Iterable[dict[str, Any]], key: str, kind: str) -> Points:
    values = ((r["step"], value_of(key, r)) for r in records if r["kind"] == kind)
    return [(step, value) for step, value in values if value is not None]


def _last(records: Sequence[dict[str, Any]], wanted: Any) -> dict[str, Any] | None:
    return next((record for record in reversed(records) if wanted(record)), None)


def _latest_list(records: Sequence[dict[str, Any]], key: str) -> list[float]:
    record = _last(records, lambda record: _are_numbers(record.get(key)))
    return [] if record is None else record[key]


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(map(is_number, values))


def _by_collective(record: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Returns how many collectives of each kind a step has, and the bytes that they send."""
    sent = {
        key.removesuffix(BYTES_PER_STEP): value
        for key, value in record.items()
        if key.endswith(BYTES_PER_STEP) and is_number(value)
    }
    return {name: record.get(name + PER_STEP, 0) for name in sent}, sent


def _mean_stages(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the mean milliseconds of each stage, in the order of a step."""
    timed = [
        {name: ms for name, ms in r["stage_ms"].items() if is_number(ms)}
        for r in records
        if isinstance(r.get("stage_ms"), dict)
    ][-STAGE_RECORDS:]
    names = dict.fromkeys(name for stages in timed for name in stages)
    return {name: sum(stages.get(name, 0.0) for stages in timed) / len(timed) for name in names}
