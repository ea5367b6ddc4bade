"""Small tables, made for tests."""

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import feather

from fusedrec_torchrec.training.data.table_options import TableOptions


def write_csv(path: Path, rows: list[list[str]], header: list[str] | None = None) -> Path:
    """Writes text, packed as the name says; delimited by tabs if it ends in .tsv."""
    delimiter = "\t" if ".tsv" in path.name else ","
    lines = [delimiter.join(row) for row in ([header] if header else []) + rows]
    return write_text(path, "".join(f"{line}\n" for line in lines))


def write_text(path: Path, text: str) -> Path:
    data = text.encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = pa.compress(data, codec="zstd", asbytes=True)
    path.write_bytes(data)
    return path


def write_table(path: Path, columns: dict[str, Any] | pa.Table, rows: int = 64) -> Path:
    """Writes a table in the format that the name says, in groups of so many rows."""
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows)
    elif path.suffix == ".feather":
        feather.write_feather(table, str(path), chunksize=rows)
    elif path.name.endswith(".stream.arrow"):
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
    return path


def options(*files: Path, **settings: Any) -> TableOptions:
    """Options for files, with small parts."""
    defaults: dict[str, Any] = {"part_rows": 40, "group_rows": 16, "transform": "none"}
    return TableOptions(files=[str(file) for file in files], **{**defaults, **settings})
