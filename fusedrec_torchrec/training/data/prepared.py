"""Reads data that ``fusedrec prepare`` wrote: parquet files and a manifest."""

from bisect import bisect_right
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fusedrec_torchrec.access.samples import DamagedDataError, Samples
from fusedrec_torchrec.training.data.criteo import LABEL
from fusedrec_torchrec.training.data.parquet import open_parquet, reading
from fusedrec_torchrec.training.data.prepared_files import (
    VERSION,
    RowGroup,
    columns_of,
    read_manifest,
    remedy,
    row_groups,
)

__all__ = ["VERSION", "PreparedData"]

CACHED_GROUPS = 16


class PreparedData:
    """Is a ``Source`` of prepared samples, in the order of the text they come from."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def open(cls, folder: str | Path) -> "PreparedData":
        """Opens a folder and compares its files with what the manifest says about them.

        Only the ends of files are read for that, which say what is in them.

        Raises:
            ValueError: no prepared data there, or of another version, or files are missing, damaged
                or not those that the manifest lists; it names the file.
        """
        folder = Path(folder)
        data = cls(folder, read_manifest(folder))
        counted = int(data.blocks.sum())
        assert counted == data.samples, (counted, data.samples)
        return data

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this data from other data."""
        return {**self.manifest["identity"], "clicks": self.manifest["clicks"]}

    @property
    def samples(self) -> int:
        """Number of samples."""
        return int(self.manifest["samples"])

    @property
    def hot_samples(self) -> tuple[int, float] | None:
        """Hot samples at the beginning, and share held out at the end; None if it is not sorted."""
        identity = self.manifest["identity"]
        if "hot_samples" not in identity:
            return None
        return int(identity["hot_samples"]), float(identity["held_out"])

    @property
    def left_out(self) -> list[str]:
        """Lines of a message about malformed lines that were left out; empty if there were none."""
        bad = self.manifest["bad_lines"]
        if not bad["counts"]:
            return []
        counts = ", ".join(f"{number} {kind}" for kind, number in bad["counts"].items())
        head = f"{self.folder}: malformed lines were left out: {counts}"
        return [head, *(f"  {example}" for example in bad["examples"])]

    @property
    def dense_features(self) -> int:
        """Number of dense features."""
        return len(self.manifest["dense"])

    @property
    def table_rows(self) -> dict[str, int]:
        """Number of rows of each table."""
        return dict(self.manifest["tables"])

    @property
    def blocks(self) -> NDArray[np.int64]:
        """Sizes of the blocks that are best read at once."""
        return np.diff(self._starts)

    def read(self, start: int, stop: int) -> Samples:
        """Returns samples ``start`` to ``stop``."""
        assert 0 <= start < stop <= self.samples, (start, stop)
        first = bisect_right(self._starts, start) - 1
        last = bisect_right(self._starts, stop - 1) - 1
        groups = Samples.concatenate([self._group(i) for i in range(first, last + 1)])
        offset = int(self._starts[first])
        if (start, stop) == (offset, int(self._starts[last + 1])):
            return groups
        return groups.take(np.arange(start - offset, stop - offset))

    @cached_property
    def _groups(self) -> list[RowGroup]:
        return row_groups(self.folder, self.manifest)

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """Holds the first sample of each row group, and the end."""
        return np.cumsum([0] + [group.samples for group in self._groups])

    @cached_property
    def _group(self) -> Any:
        return lru_cache(CACHED_GROUPS)(self._read_group)

    def _read_group(self, index: int) -> Samples:
        group = self._groups[index]
        names = columns_of(self.manifest)
        with reading(group.path, remedy(self.folder)):
            table = _file(group.path).read_row_group(group.number, names, use_threads=False)
        for name in names:
            if table[name].null_count:
                raise DamagedDataError(
                    f"{group.path} is damaged: column {name!r} has {table[name].null_count} values "
                    f"that are missing; {remedy(self.folder)}"
                )
        dense = np.stack([table[name].to_numpy() for name in self.manifest["dense"]], axis=1)
        ids = np.stack([table[name].to_numpy() for name in self.manifest["tables"]])
        labels = table[LABEL].to_numpy().astype(np.float32)
        return Samples(dense.astype(np.float32, copy=False), labels, ids.astype(np.int64).ravel())

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out open files: reader processes open their own."""
        return {"folder": self.folder, "manifest": self.manifest}


@lru_cache(64)
def _file(path: Path) -> pq.ParquetFile:
    return open_parquet(path)
