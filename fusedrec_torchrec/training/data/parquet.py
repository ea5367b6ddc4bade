"""Reads and writes parquet files; errors name the file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fusedrec_torchrec.access.samples import DamagedDataError
from fusedrec_torchrec.core.files import replacing

__all__ = ["open_parquet", "reading", "write_parquet"]


def write_parquet(path: Path, table: pa.Table, group_rows: int) -> None:
    """Writes a file that appears under its name only when it is whole."""
    with replacing(path) as partial:
        pq.write_table(
            table,
            partial,
            row_group_size=group_rows,
            compression="zstd",
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        )


def open_parquet(path: Path) -> pq.ParquetFile:
    """Opens a file whose pages are compared with their checksums as they are read."""
    return pq.ParquetFile(path, page_checksum_verification=True)


@contextmanager
def reading(path: Path, remedy: str) -> Iterator[None]:
    """Turns what goes wrong inside into an error that names the file, and what to do about it.

    Raises:
        DamagedDataError: the file cannot be opened or is damaged.
    """
    try:
        yield
    except OSError as error:
        # Arrow reports damage in compressed pages as an error of the system without a number.
        damaged = error.errno is None
        reason = str(error) if error.errno is None else os.strerror(error.errno)
    except pa.ArrowException as error:
        damaged, reason = True, str(error)
    else:
        return
    what = "is damaged" if damaged else "cannot be read"
    raise DamagedDataError(f"{path} {what}: {reason.rstrip('.')}; {remedy}")
