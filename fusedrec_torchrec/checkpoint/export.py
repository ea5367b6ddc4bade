"""Exports tables for serving, as a safetensors or Parquet file for each table.

Rows are read and written some at a time, so a table need not fit into memory.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from fusedrec_torchrec.checkpoint.contents import Contents, StoredTable
from fusedrec_torchrec.checkpoint.file_names import FORMATS
from fusedrec_torchrec.checkpoint.table_state import COUNTS

__all__ = ["export_table"]

AT_ONCE = 32 << 20  # bytes
SAFETENSORS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
ARROW: dict[torch.dtype, Any] = {
    torch.float32: pa.float32(),
    torch.float16: pa.float16(),
    torch.bfloat16: pa.float32(),  # Arrow has none
}


class _Columns:
    """The columns that are written of a table: its weight and perhaps its optimizer states."""

    def __init__(self, contents: Contents, table: StoredTable, with_states: bool) -> None:
        self._contents, self.table = contents, table
        contents.reader.check_sizes()  # so that what is allocated for a piece is in the files
        self.states = [s for s in table.states if s not in COUNTS] if with_states else []
        self.widths = {"weight": table.columns}
        self.types = {"weight": table.dtype}
        for state in self.states:
            stored = contents.state(table, state)
            self.widths[state] = table.columns if stored.by_element else 1
            self.types[state] = contents.reader.tensors[stored.name].properties.dtype
        for name, dtype in self.types.items():
            if dtype not in SAFETENSORS:
                raise ValueError(
                    f"{name} of table {table.name!r} is {dtype}, must be one of "
                    f"{[str(d) for d in SAFETENSORS]}"
                )

    def about(self) -> dict[str, str]:
        """Returns what a server must know beside the numbers."""
        about = {"table": self.table.name}
        entry, manifest = self._contents.entry(self.table), self._contents.manifest
        if manifest is not None and manifest.step is not None:
            about["step"] = str(manifest.step)
        if entry is not None and entry.hash_seed is not None:
            about |= {"hash_seed": str(entry.hash_seed), "hash_salt": str(entry.hash_salt)}
        return about

    def read(self, name: str, first: int, rows: int) -> torch.Tensor:
        """Returns some rows of one of the columns, [rows, width]."""
        into = torch.empty(rows, self.widths[name], dtype=self.types[name])
        if name == "weight":
            self._contents.reader.read(self.table.weight, (first, 0), into)
            return into
        stored = self._contents.state(self.table, name)
        if stored.by_element:
            self._contents.reader.read(stored.name, (first, 0), into)
        else:
            stored.rows(first, into.view(-1))
        return into

    def ranges(self, names: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Yields (first row, rows) of pieces that fit into memory."""
        row = sum(self.widths[name] * self.types[name].itemsize for name in names)
        step = max(AT_ONCE // max(row, 1), 1)
        for first in range(0, self.table.rows, step):
            yield first, min(step, self.table.rows - first)


def export_table(
    contents: Contents, table: StoredTable, folder: Path, form: str, with_states: bool = False
) -> Path:
    """Writes a table to ``folder/table.safetensors`` or ``folder/table.parquet``.

    Args:
        contents: what the checkpoint holds.
        table: one of its tables.
        folder: where the file goes.
        form: one of ``FORMATS``.
        with_states: whether optimizer states are written, too.

    Returns:
        The file.

    Raises:
        ValueError: an unknown format, or a type that it does not have.
    """
    if form not in FORMATS:
        raise ValueError(f"format is {form!r}, must be one of {FORMATS}")
    if Path(table.name).name != table.name:
        raise ValueError(f"table {table.name!r} has a name that no file in {folder} can have")
    columns = _Columns(contents, table, with_states)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{table.name}.{form}"
    partial = path.with_name(f".{path.name}.partial")
    (_write_safetensors if form == "safetensors" else _write_parquet)(columns, partial)
    partial.replace(path)
    return path


def _write_safetensors(columns: _Columns, path: Path) -> None:
    """Writes a header of JSON and the tensors' bytes, one after another."""
    rows, header, at = columns.table.rows, {}, 0
    for name, width in columns.widths.items():
        dtype = columns.types[name]
        size = rows * width * dtype.itemsize
        header[name] = {
            "dtype": SAFETENSORS[dtype],
            "shape": [rows, width],
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps({"__metadata__": columns.about(), **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in columns.widths:
            for first, count in columns.ranges([name]):
                file.write(columns.read(name, first, count).view(torch.uint8).numpy().data)


def _write_parquet(columns: _Columns, path: Path) -> None:
    """Writes a row number, the weight as a list of fixed size, and states as numbers or lists."""
    fields = [pa.field("row", pa.int64(), nullable=False)]
    for name, width in columns.widths.items():
        kind = ARROW[columns.types[name]]
        fields.append(pa.field(name, pa.list_(kind, width) if width > 1 else kind, nullable=False))
    schema = pa.schema(fields, metadata=columns.about())
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for first, count in columns.ranges(list(columns.widths)):
            arrays = [pa.array(range(first, first + count), pa.int64())]
            for name, width in columns.widths.items():
                numbers = columns.read(name, first, count)
                if numbers.dtype == torch.bfloat16:
                    numbers = numbers.float()
                flat = pa.array(numbers.view(-1).numpy())
                if width > 1:
                    flat = pa.FixedSizeListArray.from_arrays(flat, width)
                arrays.append(flat)
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
