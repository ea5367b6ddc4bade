"""Checks the files of prepared data: a manifest, and parquet files that must be what it says.

Everything here looks at the manifest and at the ends of parquet files, which hold the names and
types of columns and the numbers of rows; samples are not read.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from fusedrec_torchrec.access.samples import DamagedDataError
from fusedrec_torchrec.core.config import from_mapping, section
from fusedrec_torchrec.core.folder_files import check_file_name, shown
from fusedrec_torchrec.core.json_file import parse_json
from fusedrec_torchrec.training.data.file_names import LABEL, MANIFEST, WEIGHTS
from fusedrec_torchrec.training.data.parquet import reading
from fusedrec_torchrec.training.data.raw_source import Feature

__all__ = [
    "VERSION",
    "RowGroup",
    "columns_of",
    "features_of",
    "read_manifest",
    "remedy",
    "row_groups",
]

VERSION = 1


@section
class _PartFile:
    """Names a file of prepared data.

    Attributes:
        file: name of a file in the folder.
        samples: number of its rows.
    """

    file: str
    samples: int = Field(ge=1)


@section
class _BadLines:
    """Says which lines of the text were left out.

    Attributes:
        counts: lines that were left out, by what is wrong with them.
        examples: the first few.
    """

    counts: dict[str, int]
    examples: list[str]


@section
class _Feature:
    """Describes a categorical feature.

    Attributes:
        table: of the feature.
        bag: whether its column holds lists of rows, or one row.
        weights: whether a column beside it has a weight for each row of its lists.
        ids: how many rows its lists have, all together; None if nobody has counted.
    """

    table: str
    bag: bool = False
    weights: bool = False
    ids: int | None = Field(default=None, ge=0)


@section
class _Scale:
    """Says how a dense column was standardized.

    Attributes:
        mean: what was subtracted.
        deviation: what it was divided by then.
    """

    mean: float
    deviation: float


@section
class _Manifest:
    """Says what a folder of prepared data holds.

    Attributes:
        identity: what the data was made of, and how.
        dense: columns of dense features.
        tables: rows of each table.
        parts: the files, in order.
        samples: rows of all files.
        clicks: labels that are 1.
        bad_lines: what was left out of the text.
        features: columns of categorical features; if there are none, each table has one with its
            name.
        held_out: samples at the end that are for evaluation; None lets a share decide.
        scales: how dense columns were standardized.
    """

    identity: dict[str, Any]
    dense: list[str]
    tables: dict[str, int] = Field(min_length=1)
    parts: list[_PartFile] = Field(min_length=1)
    samples: int = Field(ge=1)
    clicks: int = Field(ge=0)
    bad_lines: _BadLines
    features: dict[str, _Feature] = Field(default={})
    held_out: int | None = Field(default=None, ge=0)
    scales: dict[str, _Scale] = Field(default={})

    def __post_init__(self) -> None:
        if not isinstance(self.identity.get("sources"), list):
            raise ValueError("identity has no list of sources")
        total = sum(part.samples for part in self.parts)
        if self.samples != total:
            raise ValueError(f"samples is {self.samples}, the parts have {total}")
        if self.held_out is not None and self.held_out > self.samples:
            raise ValueError(f"held_out is {self.held_out}, there are {self.samples} samples")
        if self.features and {f.table for f in self.features.values()} != set(self.tables):
            raise ValueError("features has other tables than tables")
        for name, feature in self.features.items():
            if feature.weights and not feature.bag:
                raise ValueError(f"features.{name} has weights, but no bags")


class RowGroup(NamedTuple):
    """Is a row group of a parquet file, which is read at once.

    Attributes:
        path: of the file.
        number: in the file.
        samples: how many there are in it.
    """

    path: Path
    number: int
    samples: int


def remedy(folder: Path) -> str:
    """Returns what to do about prepared data that is damaged."""
    return f"remove {folder} and prepare the data anew"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads the manifest of a folder of prepared data.

    Raises:
        ValueError: there is none, or it is damaged or of another version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no prepared data ({MANIFEST} is missing); make it with "
            f"`fusedrec prepare FILES --output {folder}`"
        )
    with reading(path, remedy(folder)):
        text = path.read_bytes()
    try:
        manifest: dict[str, Any] = parse_json(text, path)
        version = manifest["identity"]["version"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged; {remedy(folder)}") from None
    if version != VERSION:
        raise ValueError(
            f"{folder} holds prepared data of version {shown(version)}, this release reads version "
            f"{VERSION}; prepare it anew"
        )
    try:
        from_mapping(_Manifest, manifest, str(path))
        for part in manifest["parts"]:
            check_file_name(part["file"], path)
    except ValueError as error:
        raise ValueError(f"{error}; the file is damaged, {remedy(folder)}") from None
    return manifest


def features_of(manifest: dict[str, Any]) -> list[Feature]:
    """Returns the categorical features, in the order of samples."""
    features = manifest.get("features") or {name: {"table": name} for name in manifest["tables"]}
    return [
        Feature(name, own["table"], own.get("bag", False), own.get("weights", False))
        for name, own in features.items()
    ]


def columns_of(manifest: dict[str, Any]) -> list[str]:
    """Returns the columns that every file must have."""
    return list(_types_of(manifest))


def _types_of(
    manifest: dict[str, Any],
) -> dict[str, tuple[Callable[[pa.DataType], bool], str]]:
    """Returns the columns that every file must have, with what their types must be."""
    is_integer, is_float = pa.types.is_integer, pa.types.is_floating
    integer, number = (is_integer, "an integer"), (is_float, "a floating point number")
    integers = (_is_list(is_integer), "a list of integers")
    numbers = (_is_list(is_float), "a list of floating point numbers")
    wanted = {LABEL: integer, **dict.fromkeys(manifest["dense"], number)}
    for feature in features_of(manifest):
        wanted[feature.name] = integers if feature.bag else integer
        if feature.weights:
            wanted[f"{feature.name}{WEIGHTS}"] = numbers
    return wanted


def _is_list(of: Callable[[pa.DataType], bool]) -> Callable[[pa.DataType], bool]:
    return lambda kind: pa.types.is_list(kind) and of(kind.value_type)


def row_groups(folder: Path, manifest: dict[str, Any]) -> list[RowGroup]:
    """Returns the row groups of all files, in order.

    Raises:
        DamagedDataError: a file is missing or damaged, or is not what the manifest says.
    """
    groups = []
    for part in manifest["parts"]:
        path = folder / part["file"]
        if not path.is_file():
            raise DamagedDataError(f"{path} is missing; {remedy(folder)}")
        with reading(path, remedy(folder)), pq.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
        problem = _problem_of_columns(schema, manifest)
        if problem is None and metadata.num_rows != part["samples"]:
            problem = f"it has {metadata.num_rows} rows, {MANIFEST} says {part['samples']}"
        if problem is not None:
            raise DamagedDataError(f"{path} is damaged: {problem}; {remedy(folder)}")
        groups += [
            RowGroup(path, i, metadata.row_group(i).num_rows)
            for i in range(metadata.num_row_groups)
        ]
    return groups


def _problem_of_columns(schema: pa.Schema, manifest: dict[str, Any]) -> str | None:
    for name, (is_right, kind) in _types_of(manifest).items():
        places = schema.get_all_field_indices(name)
        if len(places) != 1:
            return f"it has {len(places)} columns {name!r}, must have one"
        if not is_right(schema.field(places[0]).type):
            return f"column {name!r} is {schema.field(places[0]).type}, must be {kind}"
    return None
