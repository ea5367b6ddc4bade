"""Reads text files, plain, gzipped or packed by zstd, as blocks of whole lines."""

import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fusedrec_torchrec.core.files import looked_for, naming

__all__ = ["Block", "TextFile", "find_files", "in_natural_order"]

BLOCK_BYTES = 16 << 20
PACKED_BYTES = 4096
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
SUFFIXES = (".gz", ".zst", ".tsv", ".txt", ".csv")


@dataclass(frozen=True)
class Block:
    """Holds some whole lines of a file.

    Attributes:
        data: the lines, each with its line end.
        first_line: number of the first one in its file, from 1.
        end: position behind the block in the (unpacked) file.
        packed: bytes read from disk so far, for progress.
        broken: why the file ends here too early, if it does.
    """

    data: bytes
    first_line: int
    end: int
    packed: int
    broken: str | None = None


@dataclass(frozen=True)
class TextFile:
    """Is one text file; gzip and zstd are recognised by the content, not by the name."""

    path: Path

    def blocks(self, start: int = 0, first_line: int = 1) -> Iterator[Block]:
        """Yields the file's blocks from a position that ``Block.end`` gave."""
        with naming(self.path), self.path.open("rb", buffering=0) as raw:
            head = raw.read(4)
            pieces = _gzip_pieces if head[:2] == GZIP else _zstd_pieces if head == ZSTD else None
            raw.seek(start if pieces is None else 0)
            chunks = _read(raw) if pieces is None else _joined(pieces(raw), skip=start)
            rest, line, position = b"", first_line, start
            broken: str | None = None
            for chunk, problem in chunks:
                broken = broken or problem
                data, newline, rest = (rest + chunk).rpartition(b"\n")
                if newline:
                    data += newline
                    position += len(data)
                    yield Block(data, line, position, raw.tell())
                    line += data.count(b"\n")
            if rest or broken:
                yield Block(rest, line, position + len(rest), raw.tell(), broken)


def _read(raw: BinaryIO) -> Iterator[tuple[bytes, str | None]]:
    while chunk := raw.read(BLOCK_BYTES):
        yield chunk, None


def _joined(
    pieces: Iterator[tuple[bytes, str | None]], skip: int
) -> Iterator[tuple[bytes, str | None]]:
    """Joins unpacked pieces to larger ones, but for the first ``skip`` bytes."""
    ready, size = [], 0
    for piece, broken in pieces:
        kept = piece[skip:]
        skip -= len(piece) - len(kept)
        ready.append(kept)
        size += len(kept)
        if size >= BLOCK_BYTES // 4 or broken is not None:
            yield b"".join(ready), broken
            ready, size = [], 0
    yield b"".join(ready), None


def _gzip_pieces(raw: BinaryIO) -> Iterator[tuple[bytes, str | None]]:
    """Unpacks gzip members one after another, and all that a damaged file still gives.

    ``gzip.GzipFile`` would lose what it has read ahead when the file ends too early.  Zeros after
    the last member are padding.  Pieces are small: an unpacker loses the piece in which it finds
    damage.
    """
    unpacker, packed = zlib.decompressobj(31), b""
    while packed or (packed := raw.read(PACKED_BYTES)):
        if unpacker.eof:
            packed = packed.lstrip(b"\0")
            if not packed:
                continue
            unpacker = zlib.decompressobj(31)
        try:
            piece = unpacker.decompress(packed, BLOCK_BYTES)
        except zlib.error as error:
            yield b"", f"damaged gzip: {error}"
            return
        packed = unpacker.unconsumed_tail or unpacker.unused_data
        yield piece, None
    tail = unpacker.flush()
    yield tail, None if unpacker.eof else "truncated gzip: the file ends in the middle of its data"


def _zstd_pieces(raw: BinaryIO) -> Iterator[tuple[bytes, str | None]]:
    """Unpacks zstd frames one after another, and what a damaged file gives before the damage."""
    import pyarrow as pa  # which those who only look for files need not wait for

    # Closing the stream closes its file; another descriptor has the same position.
    packed = os.fdopen(os.dup(raw.fileno()), "rb", buffering=0)
    with pa.CompressedInputStream(pa.PythonFile(packed, mode="r"), "zstd") as stream:
        while True:
            try:
                piece = stream.read(min(PACKED_BYTES * 16, BLOCK_BYTES))
            except OSError as error:
                if error.errno is not None:
                    raise
                is_short = "truncated" in str(error).lower()
                what = "truncated zstd: the file ends in the middle of its data"
                yield b"", what if is_short else f"damaged zstd: {error}"
                return
            if not piece:
                return
            yield piece, None


def find_files(paths: Sequence[str | Path]) -> list[TextFile]:
    """Returns the files that ``paths`` name, those of folders one by one, days in their order.

    Raises:
        ValueError: a path does not exist, a file is empty, a folder holds no data.
    """
    files: list[TextFile] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted((p for p in path.iterdir() if _is_data(p)), key=in_natural_order)
            if not inside:
                raise ValueError(
                    f"folder {path} holds no data files (day_N or {', '.join(SUFFIXES)})"
                )
            files += map(TextFile, inside)
        elif path.is_file():
            files.append(TextFile(path))
        elif path.exists():
            raise ValueError(f"data file {path} is neither a file nor a folder of files")
        else:
            raise ValueError(f"data file {path} does not exist{looked_for(path)}")
    if not files:
        raise ValueError("no data files given")
    for file in files:
        if file.path.stat().st_size == 0:
            raise ValueError(f"data file {file.path} is empty")
    return files


def _is_data(path: Path) -> bool:
    return path.is_file() and (path.suffix in SUFFIXES or path.name.startswith("day_"))


def in_natural_order(path: Path) -> list[tuple[int, str]]:
    """Returns a sort key that has day_2 before day_10."""
    words = re.split(r"(\d+)", path.name)
    return [(int(word), "") if word.isdigit() else (-1, word) for word in words]
