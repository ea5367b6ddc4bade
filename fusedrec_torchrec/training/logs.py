"""Writes the records of a run: JSON lines for programs, TensorBoard for people."""

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

from fusedrec_torchrec.core.json_file import parse_json

__all__ = ["RunLog", "read_log"]

FILE = "metrics.jsonl"


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Returns the records of a run, in order.

    Raises:
        ValueError: a line is something else.
    """
    path = folder / FILE
    if not path.exists():
        return []
    records: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        try:
            record = parse_json(line, path)
        except ValueError:
            break  # the run was stopped while writing its last line
        if not isinstance(record, dict) or not {"step", "kind"} <= set(record):
            raise ValueError(f"{path} is damaged: line {len(records) + 1} is no record of a run")
        records.append(record)
    return records


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
        partial = folder / (FILE + ".partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in records))
        partial.replace(folder / FILE)
        self._file = (folder / FILE).open("a", buffering=1)
        self._writer = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(
                str(folder / "tensorboard"), purge_step=step + 1 if step else None
            )

    def write(self, step: int, kind: str, values: dict[str, float]) -> None:
        """Writes one record; ``kind`` is ``train`` or ``eval``."""
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}
        try:
            self._file.write(json.dumps({"step": step, "kind": kind, **finite}) + "\n")
            if self._writer is not None:
                for name, value in values.items():
                    self._writer.add_scalar(f"{kind}/{name}", value, step)
        except OSError as error:  # a full disk is no reason to stop on this rank alone
            print(f"warning: record of step {step} is lost: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Closes all files."""
        with contextlib.suppress(OSError):
            self._file.close()
        if self._writer is not None:
            self._writer.close()
