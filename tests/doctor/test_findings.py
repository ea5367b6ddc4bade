"""A report cannot call good what was not looked at."""

from pathlib import Path

import pytest

from fusedrec_torchrec.doctor.findings import (
    Finding,
    Findings,
    failed,
    good,
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
