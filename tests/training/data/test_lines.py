"""Blocks of lines from plain, gzipped, damaged and resumed files."""

import gzip
import random
from pathlib import Path

import pytest

from fusedrec_torchrec.training.data import lines
from fusedrec_torchrec.training.data.lines import TextFile, find_files

CONTENT = b"".join(b"line %d\n" % i for i in range(5000))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 4096)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("last_newline", [False, True])
def test_blocks_are_whole_lines_with_their_numbers(
    tmp_path: Path, packed: bool, last_newline: bool
) -> None:
    content = CONTENT if last_newline else CONTENT[:-1]
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(content) if packed else content)
    blocks = list(TextFile(path).blocks())
    assert len(blocks) > 3
    assert b"".join(block.data for block in blocks) == content
    for block in blocks:
        assert block.data.startswith(b"line %d\n" % (block.first_line - 1)) or block is blocks[-1]
        assert block.broken is None
    assert blocks[-1].end == len(content)
    assert blocks[-1].packed == path.stat().st_size


@pytest.mark.parametrize("packed", [False, True])
def test_reading_goes_on_from_a_block_s_end(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(CONTENT) if packed else CONTENT)
    all_blocks = list(TextFile(path).blocks())
    stop = all_blocks[2]
    next_line = stop.first_line + stop.data.count(b"\n")
    again = list(TextFile(path).blocks(stop.end, next_line))
    assert b"".join(block.data for block in again) == CONTENT[stop.end :]
    assert again[0].first_line == next_line


def test_several_gzip_members_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(CONTENT[:10_000]) + gzip.compress(CONTENT[10_000:]))
    assert b"".join(block.data for block in TextFile(path).blocks()) == CONTENT


def test_truncated_gzip_gives_all_it_has_and_says_so(tmp_path: Path) -> None:
    whole = gzip.compress(CONTENT)
    path = tmp_path / "file.gz"
    path.write_bytes(whole[:-9])  # its checksum is cut, nothing of the content
    blocks = list(TextFile(path).blocks())
    assert b"".join(block.data for block in blocks) == CONTENT
    assert blocks[-1].broken is not None and "truncated gzip" in blocks[-1].broken

    path.write_bytes(whole[: len(whole) // 2])
    blocks = list(TextFile(path).blocks())
    data = b"".join(block.data for block in blocks)
    assert CONTENT.startswith(data) and len(data) > len(CONTENT) // 4
    assert blocks[-1].broken is not None


def test_damaged_gzip_says_so(tmp_path: Path) -> None:
    damaged = bytearray(gzip.compress(CONTENT))
    damaged[-8] ^= 1  # of the checksum
    path = tmp_path / "file.gz"
    path.write_bytes(damaged)
    assert "damaged gzip" in str(list(TextFile(path).blocks())[-1].broken)


def test_damage_in_the_middle_leaves_what_comes_before_it(tmp_path: Path) -> None:
    generator = random.Random(0)
    content = b"".join(b"%x\n" % generator.getrandbits(64) for _ in range(5000))
    damaged = bytearray(gzip.compress(content))
    damaged[len(damaged) // 2 : len(damaged) // 2 + 50] = bytes(50)
    path = tmp_path / "file.gz"
    path.write_bytes(damaged)
    blocks = list(TextFile(path).blocks())
    assert blocks[-1].broken is not None
    data = b"".join(block.data for block in blocks)
    assert data[: len(content) // 3] == content[: len(content) // 3]


def test_zeros_after_a_gzip_are_padding(tmp_path: Path) -> None:
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(CONTENT) + bytes(10_000))
    blocks = list(TextFile(path).blocks())
    assert b"".join(block.data for block in blocks) == CONTENT
    assert all(block.broken is None for block in blocks)


def test_folders_hold_days_in_their_order(tmp_path: Path) -> None:
    for name in ("day_10", "day_2.gz", "day_1", "notes.md", "a.tsv", "b.txt", "c.csv"):
        (tmp_path / name).write_text("x")
    assert [file.path.name for file in find_files([tmp_path])] == [
        *("a.tsv", "b.txt", "c.csv", "day_1", "day_2.gz", "day_10"),
    ]


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data file .*nowhere\.tsv does not exist"):
        find_files([tmp_path / "nowhere.tsv"])
    (tmp_path / "empty.tsv").touch()
    with pytest.raises(ValueError, match=r"data file .*empty\.tsv is empty"):
        find_files([tmp_path / "empty.tsv"])
    (tmp_path / "full.tsv").write_text("x")
    with pytest.raises(ValueError, match=r"empty\.tsv is empty"):
        find_files([tmp_path / "full.tsv", tmp_path / "empty.tsv"])
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="holds no data files"):
        find_files([tmp_path / "folder"])
    with pytest.raises(ValueError, match="no data files given"):
        find_files([])
