"""Reads data that ``fusedrec prepare`` wrote: parquet files and a manifest."""

from bisect import bisect_right
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fusedrec_torchrec.access.samples import DamagedDataError, Samples
from fusedrec_torchrec.training.data.file_names import LABEL, WEIGHTS
from fusedrec_torchrec.training.data.parquet import open_parquet, reading
from fusedrec_torchrec.training.data.prepared_files import (
    VERSION,
    RowGroup,
    columns_of,
    features_of,
    read_manifest,
    remedy,
    row_groups,
)
from fusedrec_torchrec.training.data.raw_source import Feature

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
    def features(self) -> dict[str, str]:
        """The table of each feature."""
        return {feature.name: feature.table for feature in self._features}

    @property
    def weighted(self) -> bool:
        """Whether ids have weights."""
        return any(feature.weights for feature in self._features)

    @property
    def has_bags(self) -> bool:
        """Whether a feature may have any number of ids in a sample."""
        return any(feature.bag for feature in self._features)

    @property
    def poolings(self) -> dict[str, float]:
        """Average number of ids of each feature in a sample."""
        described = self.manifest.get("features", {})
        ids = {name: described.get(name, {}).get("ids", self.samples) for name in self.features}
        return {name: count / self.samples for name, count in ids.items()}

    @property
    def held_out(self) -> int | None:
        """How many samples at the end are for evaluation; None if a share decides."""
        return self.manifest.get("held_out")

    @cached_property
    def _features(self) -> list[Feature]:
        return features_of(self.manifest)

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
        dense = np.zeros((group.samples, self.dense_features), np.float32)
        for i, name in enumerate(self.manifest["dense"]):
            dense[:, i] = table[name].to_numpy()
        labels = table[LABEL].to_numpy().astype(np.float32)
        if not self.has_bags:
            ids = np.stack([table[feature.name].to_numpy() for feature in self._features])
            return Samples(dense, labels, ids.astype(np.int64).ravel())
        bags = [self._bags(table, feature, group) for feature in self._features]
        ids, lengths, weights = zip(*bags, strict=True)
        return Samples(
            dense,
            labels,
            np.concatenate(ids).astype(np.int64, copy=False),
            np.stack(lengths).astype(np.int32, copy=False),
            np.concatenate(weights).astype(np.float32, copy=False) if self.weighted else None,
        )

    def _bags(
        self, table: pa.Table, feature: Feature, group: RowGroup
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Returns the ids of a feature, the lengths of its bags, and the weights of ids."""
        column = table[feature.name].combine_chunks()
        if not feature.bag:
            ids = column.to_numpy(zero_copy_only=False)
            return ids, np.ones(len(ids), np.int32), np.ones(len(ids), np.float32)
        ids = column.flatten().to_numpy(zero_copy_only=False)
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        if not feature.weights:
            return ids, lengths, np.ones(len(ids), np.float32)
        of_ids = table[f"{feature.name}{WEIGHTS}"].combine_chunks()
        if not np.array_equal(of_ids.value_lengths().to_numpy(zero_copy_only=False), lengths):
            raise DamagedDataError(
                f"{group.path} is damaged: column {feature.name + WEIGHTS!r} has other numbers of "
                f"weights than {feature.name!r} has ids; {remedy(self.folder)}"
            )
        return ids, lengths, of_ids.flatten().to_numpy(zero_copy_only=False)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out open files: reader processes open their own."""
        return {"folder": self.folder, "manifest": self.manifest}


@lru_cache(64)
def _file(path: Path) -> pq.ParquetFile:
    return open_parquet(path)
