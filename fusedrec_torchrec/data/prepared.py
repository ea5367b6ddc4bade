"""Data that ``fusedrec prepare`` wrote: parquet files and a manifest."""

import json
from bisect import bisect_right
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fusedrec_torchrec.data.criteo import LABEL
from fusedrec_torchrec.data.samples import Samples

__all__ = ["MANIFEST", "VERSION", "PreparedData"]

MANIFEST = "manifest.json"
VERSION = 1
CACHED_GROUPS = 16


class PreparedData:
    """Samples in the order of the text they come from.  A ``Source``."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def open(cls, folder: str | Path) -> "PreparedData":
        """
        Raises:
            ValueError: no prepared data there, or of another version, or files are missing.
        """
        folder = Path(folder)
        path = folder / MANIFEST
        if not path.is_file():
            raise ValueError(
                f"{folder} holds no prepared data ({MANIFEST} is missing); make it with "
                f"`fusedrec prepare FILES --output {folder}`"
            )
        try:
            manifest = json.loads(path.read_text())
            version = manifest["identity"]["version"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{path} is damaged; prepare the data anew") from None
        if version != VERSION:
            raise ValueError(
                f"{folder} holds prepared data of version {version}, this release reads version "
                f"{VERSION}; prepare it anew"
            )
        for part in manifest["parts"]:
            if not (folder / part["file"]).is_file():
                raise ValueError(f"{folder / part['file']} is missing; prepare the data anew")
        return cls(folder, manifest)

    @property
    def identity(self) -> dict[str, Any]:
        return {**self.manifest["identity"], "clicks": self.manifest["clicks"]}

    @property
    def samples(self) -> int:
        return int(self.manifest["samples"])

    @property
    def hot_samples(self) -> tuple[int, float] | None:
        """Hot samples at the beginning, and the share held out at the end; None if not sorted."""
        identity = self.manifest["identity"]
        if "hot_samples" not in identity:
            return None
        return int(identity["hot_samples"]), float(identity["held_out"])

    @property
    def left_out(self) -> list[str]:
        bad = self.manifest["bad_lines"]
        if not bad["counts"]:
            return []
        counts = ", ".join(f"{number} {kind}" for kind, number in bad["counts"].items())
        head = f"{self.folder}: malformed lines were left out: {counts}"
        return [head, *(f"  {example}" for example in bad["examples"])]

    @property
    def dense_features(self) -> int:
        return len(self.manifest["dense"])

    @property
    def table_rows(self) -> dict[str, int]:
        return dict(self.manifest["tables"])

    @property
    def blocks(self) -> NDArray[np.int64]:
        return np.diff(self._starts)

    def read(self, start: int, stop: int) -> Samples:
        assert 0 <= start < stop <= self.samples, (start, stop)
        first = bisect_right(self._starts, start) - 1
        last = bisect_right(self._starts, stop - 1) - 1
        groups = Samples.concatenate([self._group(i) for i in range(first, last + 1)])
        offset = int(self._starts[first])
        if (start, stop) == (offset, int(self._starts[last + 1])):
            return groups
        return groups.take(np.arange(start - offset, stop - offset))

    @cached_property
    def _groups(self) -> list[tuple[Path, int, int]]:
        """File, number in it and samples of each row group."""
        groups = []
        for part in self.manifest["parts"]:
            path = self.folder / part["file"]
            metadata = pq.ParquetFile(path).metadata
            groups += [
                (path, i, metadata.row_group(i).num_rows) for i in range(metadata.num_row_groups)
            ]
        return groups

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """First sample of each row group, and the end."""
        return np.cumsum([0] + [rows for _, _, rows in self._groups])

    @cached_property
    def _group(self) -> Any:
        return lru_cache(CACHED_GROUPS)(self._read_group)

    def _read_group(self, index: int) -> Samples:
        path, number, _ = self._groups[index]
        table = _file(path).read_row_group(number, use_threads=False)
        dense = np.stack([table[name].to_numpy() for name in self.manifest["dense"]], axis=1)
        ids = np.stack([table[name].to_numpy() for name in self.manifest["tables"]])
        labels = table[LABEL].to_numpy().astype(np.float32)
        return Samples(dense, labels, ids.astype(np.int64).ravel())

    def __getstate__(self) -> dict[str, Any]:
        """Reader processes open their own files."""
        return {"folder": self.folder, "manifest": self.manifest}


@lru_cache(64)
def _file(path: Path) -> pq.ParquetFile:
    return pq.ParquetFile(path)
