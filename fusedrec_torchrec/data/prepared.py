"""Data that ``fusedrec prepare`` wrote: parquet files and a manifest."""

from bisect import bisect_right
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fusedrec_torchrec.data.criteo import LABEL
from fusedrec_torchrec.data.samples import Samples
from fusedrec_torchrec.folder_files import check_file_name, shown
from fusedrec_torchrec.json_file import parse_json

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
        manifest = parse_json(path.read_bytes(), path)
        version = _version(manifest)
        if version is None:
            raise ValueError(f"{path} is damaged; prepare the data anew")
        if version != VERSION:
            raise ValueError(
                f"{folder} holds prepared data of version {shown(version)}, this release reads "
                f"version {VERSION}; prepare it anew"
            )
        _check(manifest, path)
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
            metadata = _file(path).metadata
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
        try:
            table = _file(path).read_row_group(number, use_threads=False)
            dense = np.stack([table[name].to_numpy() for name in self.manifest["dense"]], axis=1)
            ids = np.stack([table[name].to_numpy() for name in self.manifest["tables"]])
            labels = table[LABEL].to_numpy().astype(np.float32)
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            raise _damaged(path, error) from None
        return Samples(dense, labels, ids.astype(np.int64).ravel())

    def __getstate__(self) -> dict[str, Any]:
        """Reader processes open their own files."""
        return {"folder": self.folder, "manifest": self.manifest}


@lru_cache(64)
def _file(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is damaged: {error}; prepare the data anew")


def _version(manifest: Any) -> Any:
    """Of the data that a manifest describes; None if it is no manifest."""
    identity = manifest.get("identity") if isinstance(manifest, dict) else None
    return identity.get("version") if isinstance(identity, dict) else None


def _check(manifest: dict[str, Any], path: Path) -> None:
    """
    Raises:
        ValueError: the manifest names files of other folders, or a field is missing or wrong.
    """
    bad_lines: Any = manifest.get("bad_lines")
    parts: Any = manifest.get("parts")
    tables: Any = manifest.get("tables")
    is_whole = (
        _is_list_of(str, manifest.get("dense"))
        and isinstance(tables, dict)
        and _is_list_of(int, [*tables.values(), manifest.get("samples"), manifest.get("clicks")])
        and _is_list_of(dict, parts)
        and isinstance(bad_lines, dict)
        and isinstance(bad_lines.get("counts"), dict)
        and _is_list_of(int, list(bad_lines["counts"].values()))
        and _is_list_of(str, bad_lines.get("examples"))
    )
    if not is_whole:
        raise ValueError(f"{path} is damaged: a field is missing or wrong; prepare the data anew")
    for part in parts:
        check_file_name(part.get("file"), path)


def _is_list_of(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)
