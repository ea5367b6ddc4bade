"""A report cannot call good what was not looked at."""

import getpass
import socket
from pathlib import Path

import pytest

from fusedrec_torchrec.doctor.findings import (
    Finding,
    Findings,
    failed,
    good,
    guarded,
    read_findings,
    skipped,
)


def of(*findings: Finding) -> Findings:
    return Findings("title", {"cores": 2}, list(findings))


@pytest.mark.parametrize(
    ("findings", "verdict", "has_failed"),
    [
        ([good("a", "x"), good("b", "x")], "All good: 2 of 2.", False),
        (
            [good("a", "x"), skipped("b", "why")],
            "Nothing failed, but 1 skipped and so unknown; 1 good.",
            False,
        ),
        (
            [good("a", "x"), failed("b", "x"), skipped("c", "")],
            "1 failed, 1 skipped, 1 good.",
            True,
        ),
        ([skipped("a", "why")], "Nothing was examined: 1 skipped.", True),
        ([], "Nothing was examined: 0 skipped.", True),
    ],
)
def test_the_verdict_is_counted(findings: list[Finding], verdict: str, has_failed: bool) -> None:
    report = of(*findings)
    assert report.verdict == verdict
    assert report.has_failed == has_failed
    assert ("All good" in report.text()) == (verdict.startswith("All good"))


def test_what_was_skipped_is_listed_with_its_reason_in_text_and_data(tmp_path: Path) -> None:
    report = of(
        good("a", "fine", bytes=[1, 2]), skipped("b", "no GPU"), failed("c", "Error:\nline\nline")
    )
    path = tmp_path / "folder" / "report.md"
    report.write(path)
    text = path.read_text()
    assert "## Skipped\n\n- **b**: no GPU\n" in text
    assert "    - bytes: [1, 2]" in text
    assert read_findings(path) == report


def test_errors_name_no_folder_host_or_user(tmp_path: Path) -> None:
    home, here, host, user = Path.home(), Path.cwd(), socket.gethostname(), getpass.getuser()

    def check() -> Finding:
        raise OSError(f"{home}/x, {here}/runs/y: {user}@{host} cannot")

    finding = guarded("a", check)
    assert finding.detail == "OSError: <home>/x, <here>/runs/y: <user>@<host> cannot"
    path = tmp_path / "report.md"
    of(finding).write(path)
    assert "<user>@<host> cannot" in path.read_text()
    assert all(f"{private}" not in path.read_text() for private in (home, here, host))


def test_the_private_folder_that_lies_in_the_other_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(work)
    shown = failed("a", f"{work}/run, {work}, {tmp_path}/run, {tmp_path}, {work}.old, {work}s")
    assert shown.detail == "<here>/run, <here>, <home>/run, <home>, <home>/work.old, <home>/works"
    monkeypatch.chdir("/")
    assert failed("a", "/x/y: no such file").detail == "/x/y: no such file"


def test_parts_of_words_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ann")
    shown = failed("a", "channel of ann, /tmp/ann/x, /home/ann.old, joann: Permission denied")
    expected = "channel of <user>, /tmp/<user>/x, /home/<user>.old, joann: Permission denied"
    assert shown.detail == expected
