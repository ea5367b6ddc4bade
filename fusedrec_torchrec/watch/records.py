"""Reads the records of a run as they are written."""

import os
from pathlib import Path
from typing import Any

from fusedrec_torchrec.core.json_file import parse_json
from fusedrec_torchrec.training.logs import RECORDS, is_record

__all__ = ["RecordReader"]


class RecordReader:
    """Reads the records of a run, each once, however often it is asked.

    A last line that is not whole yet waits for its end.  A file that was replaced, as by a run that
    goes on from an earlier checkpoint or begins anew, is read from its beginning.

    Args:
        folder: of the run.

    Attributes:
        records: all of them so far, in order.
        damaged: how many lines were whole, but no records.
        written: when the file was last written, in seconds since the epoch; None without a file.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / RECORDS
        self._file: tuple[int, int] | None = None
        self._position = 0
        self.records: list[dict[str, Any]] = []
        self.damaged = 0
        self.written: float | None = None

    def refresh(self) -> None:
        """Reads what was written since the last time."""
        try:
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                if self._file != (about.st_dev, about.st_ino) or about.st_size < self._position:
                    self._forget()
                self._file = about.st_dev, about.st_ino
                self.written = about.st_mtime
                file.seek(self._position)
                self._take(file.read())
        except FileNotFoundError:
            self._forget()

    def _forget(self) -> None:
        self._file, self._position, self.written = None, 0, None
        self.records, self.damaged = [], 0

    def _take(self, content: bytes) -> None:
        whole, _, _ = content.rpartition(b"\n")
        self._position += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            try:
                record = parse_json(line, self._path)
            except ValueError:
                record = None
            if is_record(record) and type(record["step"]) is int:
                self.records.append(record)
            else:
                self.damaged += 1
