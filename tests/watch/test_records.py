"""Records are read while they are written, each once."""

from pathlib import Path

from fusedrec_torchrec.watch.records import RecordReader
from tests.watch.runs import record, text_of

FILE = "metrics.jsonl"


def steps(reader: RecordReader) -> list[int]:
    reader.refresh()
    return [one["step"] for one in reader.records]


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    reader = RecordReader(tmp_path)
    assert steps(reader) == []  # there is no file yet
    whole = text_of([record(10), record(20)])
    with (tmp_path / FILE).open("w", buffering=1) as file:
        for cut in (30, len(whole) // 2 + 40, len(whole) - 1, len(whole)):
            file.seek(0)
            file.write(whole[:cut])
            file.flush()
            assert len(steps(reader)) == whole[:cut].count("\n")
    assert steps(reader) == [10, 20] and reader.damaged == 0


def test_lines_that_are_no_records_are_counted_and_left_out(tmp_path: Path) -> None:
    lines = text_of([record(10)]) + 'nonsense\n[1]\n{"step": "x", "kind": "train"}\n\xff\n'
    (tmp_path / FILE).write_bytes(lines.encode("latin-1") + text_of([record(20)]).encode())
    reader = RecordReader(tmp_path)
    assert steps(reader) == [10, 20] and reader.damaged == 4


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text_of([record(10), record(20), record(30)]))
    reader = RecordReader(tmp_path)
    assert steps(reader) == [10, 20, 30]
    # A run that goes on from step 10 drops what came later, in another file of that name.
    (tmp_path / "new").write_text(text_of([record(10), record(11), record(12), record(13)]))
    (tmp_path / "new").replace(tmp_path / FILE)
    assert steps(reader) == [10, 11, 12, 13]
    (tmp_path / FILE).write_text(text_of([record(5)]))  # the same file, but shorter
    assert steps(reader) == [5]
    (tmp_path / FILE).unlink()
    assert steps(reader) == [] and reader.written is None
