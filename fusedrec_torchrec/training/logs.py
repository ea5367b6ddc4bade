"""Writes the records of a run: JSON lines for programs, TensorBoard for people."""

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fusedrec_torchrec.core.json_file import parse_json

__all__ = ["RECORDS", "RunLog", "Value", "is_record", "read_log"]

RECORDS = "metrics.jsonl"
Value = float | list[float] | dict[str, float]
"""What a record says: a number, one of each rank, or one of each stage."""


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Returns the records of a run, in order.

    Raises:
        ValueError: a line is something else.
    """
    path = folder / RECORDS
    if not path.exists():
        return []
    records: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        try:
            record = parse_json(line, path)
        except ValueError:
            break  # the run was stopped while writing its last line
        if not is_record(record):
            raise ValueError(f"{path} is damaged: line {len(records) + 1} is no record of a run")
        records.append(record)
    return records


def is_record(record: Any) -> bool:
    """Returns whether this is what a line of the records holds."""
    return isinstance(record, dict) and {"step", "kind"} <= set(record)


class RunLog:
    """Writes the records of a run; a resumed one goes on after the step it resumes from.

    Args:
        folder: the run's folder.
        step: steps done so far; later records of an earlier attempt are dropped.
        tensorboard: whether to write TensorBoard files, too.
    """

    def __init__(self, folder: Path, step: int, tensorboard: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        records = [record for record in read_log(folder) if step and record["step"] <= step]
        partial = folder / (RECORDS + ".partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in records))
        partial.replace(folder / RECORDS)
        self._file = (folder / RECORDS).open("a", buffering=1)
        self._writer = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(
                str(folder / "tensorboard"), purge_step=step + 1 if step else None
            )

    def write(self, step: int, kind: str, values: Mapping[str, Value]) -> None:
        """Writes one record; ``kind`` is ``train`` or ``eval``."""
        finite = {name: _finite(value) for name, value in values.items()}
        try:
            self._file.write(json.dumps({"step": step, "kind": kind, **finite}) + "\n")
            if self._writer is not None:
                for name, number in _numbers(values):
                    self._writer.add_scalar(f"{kind}/{name}", number, step)
        except OSError as error:  # a full disk is no reason to stop on this rank alone
            print(f"warning: record of step {step} is lost: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Closes all files."""
        with contextlib.suppress(OSError):
            self._file.close()
        if self._writer is not None:
            self._writer.close()


def _finite(value: Value) -> Any:
    """Returns a value as JSON can hold it: what is no finite number is null."""
    if isinstance(value, dict):
        return {name: _finite(number) for name, number in value.items()}
    if isinstance(value, list):
        return [_finite(number) for number in value]
    return value if math.isfinite(value) else None


def _numbers(values: Mapping[str, Value]) -> Iterator[tuple[str, float]]:
    """Yields the numbers to draw; of the ranks, which may be thousands, the most and the mean."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{part}", number) for part, number in value.items())
        elif isinstance(value, list):
            yield f"{name}/most", max(value)
            yield f"{name}/mean", sum(value) / len(value)
        else:
            yield name, value
