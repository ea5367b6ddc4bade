"""Tables in memory, of whatever library: written to a file, they are files as any other."""

from collections.abc import Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["is_frame", "write_frame"]

ROWS = 1 << 16


def is_frame(data: object) -> bool:
    """Returns whether something is a table: of Polars, pandas, pyarrow or Hugging Face datasets."""
    return (
        isinstance(data, pa.Table | pa.RecordBatchReader)
        or hasattr(data, "__arrow_c_stream__")
        or _is_of(data, "datasets")
        or _is_of(data, "polars")
    )


def write_frame(data: Any, path: Path) -> None:
    """Writes a table to a parquet file, block by block.

    Raises:
        ValueError: it has no rows.
    """
    writer: pq.ParquetWriter | None = None
    try:
        for table in _tables(data):
            if table.num_rows:
                writer = writer or pq.ParquetWriter(path, table.schema)
                writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise ValueError(f"the {type(data).__name__} has no rows")


def _tables(data: Any) -> Iterator[pa.Table]:
    if _is_of(data, "datasets"):  # whose rows may have been shuffled or chosen
        yield from methodcaller("iter", batch_size=ROWS)(data.with_format("arrow"))
    elif _is_of(data, "polars"):
        whole = data.collect() if hasattr(data, "collect") else data
        yield whole.to_arrow()
    elif isinstance(data, pa.Table):
        yield data
    else:
        reader = data
        if not isinstance(data, pa.RecordBatchReader):
            reader = pa.RecordBatchReader.from_stream(data)
        for batch in reader:
            yield pa.Table.from_batches([batch])


def _is_of(data: object, package: str) -> bool:
    return type(data).__module__.partition(".")[0] == package
