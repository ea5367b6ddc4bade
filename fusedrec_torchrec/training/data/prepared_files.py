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
from fusedrec_torchrec.training.data.criteo import LABEL
from fusedrec_torchrec.training.data.file_names import MANIFEST
from fusedrec_torchrec.training.data.parquet import reading

__all__ = [
    "VERSION",
    "RowGroup",
    "columns_of",
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
class _Manifest:
    """Says what a folder of prepared data holds.

    Attributes:
        identity: what the data was made of, and how.
        dense: columns of dense features.
        tables: rows of each table, by its column.
        parts: the files, in order.
        samples: rows of all files.
        clicks: labels that are 1.
        bad_lines: what was left out of the text.
    """

    identity: dict[str, Any]
    dense: list[str] = Field(min_length=1)
    tables: dict[str, int] = Field(min_length=1)
    parts: list[_PartFile] = Field(min_length=1)
    samples: int = Field(ge=1)
    clicks: int = Field(ge=0)
    bad_lines: _BadLines

    def __post_init__(self) -> None:
        if not isinstance(self.identity.get("sources"), list):
            raise ValueError("identity has no list of sources")
        total = sum(part.samples for part in self.parts)
        if self.samples != total:
            raise ValueError(f"samples is {self.samples}, the parts have {total}")


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


def columns_of(manifest: dict[str, Any]) -> list[str]:
    """Returns the columns that every file must have."""
    return [LABEL, *manifest["dense"], *manifest["tables"]]


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
    is_integer, is_float = pa.types.is_integer, pa.types.is_floating
    wanted: dict[str, tuple[Callable[[pa.DataType], bool], str]] = {
        LABEL: (is_integer, "an integer"),
        **dict.fromkeys(manifest["dense"], (is_float, "a floating point number")),
        **dict.fromkeys(manifest["tables"], (is_integer, "an integer")),
    }
    for name, (is_right, kind) in wanted.items():
        places = schema.get_all_field_indices(name)
        if len(places) != 1:
            return f"it has {len(places)} columns {name!r}, must have one"
        if not is_right(schema.field(places[0]).type):
            return f"column {name!r} is {schema.field(places[0]).type}, must be {kind}"
    return None
