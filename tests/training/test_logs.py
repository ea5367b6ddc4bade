"""Records of a run that stopped, or that somebody else wrote."""

from pathlib import Path

import pytest

from fusedrec_torchrec.training.logs import read_log

RECORD = '{"step": 1, "kind": "train", "loss": 0.5}\n'


@pytest.mark.parametrize("rest", ["", '{"step": 2, "ki', "[" * 100_000, "\\xff"])
def test_a_last_line_that_was_not_finished_is_left_out(tmp_path: Path, rest: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(RECORD + rest)
    assert [record["step"] for record in read_log(tmp_path)] == [1]


@pytest.mark.parametrize("line", ["3", "[]", '{"step": 2}', "null"])
def test_lines_that_are_no_records_are_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(RECORD + line + "\n" + RECORD)
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged: line 2 is no record"):
        read_log(tmp_path)
