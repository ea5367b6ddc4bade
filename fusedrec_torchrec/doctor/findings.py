"""Findings of an examination, and the one file that they are written to.

A finding is good, has failed or was skipped, and whatever was skipped says why.  The verdict is
counted from the findings: nothing is called good if anything was skipped, or nothing was looked at.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fusedrec_torchrec.core.files import write_text
from fusedrec_torchrec.doctor.privacy import without_names

__all__ = [
    *("Finding", "Findings", "Outcome", "failed", "good", "guarded", "read_findings", "skipped"),
]

Outcome = Literal["good", "failed", "skipped"]
FENCE = "```"
SUMMARY = "<details><summary>All of it, as JSON</summary>"
VERSION = 1


@dataclass(frozen=True)
class Finding:
    """Is one thing that was looked at, or was to be.

    Attributes:
        name: what it is.
        outcome: how it went.
        detail: what was found, or why it failed or was skipped; placeholders stand for private
            folders and names.
        figures: what was counted.
    """

    name: str
    outcome: Outcome
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", without_names(self.detail))  # frozen


def good(name: str, detail: str, **figures: Any) -> Finding:
    """Returns a finding that is as it should be."""
    return Finding(name, "good", detail, figures)


def failed(name: str, detail: str, **figures: Any) -> Finding:
    """Returns a finding that is not as it should be."""
    return Finding(name, "failed", detail, figures)


def skipped(name: str, reason: str) -> Finding:
    """Returns what could not be looked at, and why."""
    return Finding(name, "skipped", reason)


def guarded(name: str, check: Callable[[], Finding]) -> Finding:
    """Returns what a check finds; one that raises has failed, and the others are worth having."""
    try:
        return check()
    except Exception as error:
        return failed(name, f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Findings:
    """Holds all findings of an examination.

    Attributes:
        title: what was examined.
        machine: what it was examined on.
        findings: in the order in which they were made.
    """

    title: str
    machine: dict[str, Any]
    findings: list[Finding]

    def of(self, outcome: Outcome) -> list[Finding]:
        """Returns the findings that went so."""
        return [finding for finding in self.findings if finding.outcome == outcome]

    @property
    def has_failed(self) -> bool:
        """Whether anything is not as it should be, or nothing was looked at."""
        return bool(self.of("failed")) or not self.of("good")

    @property
    def verdict(self) -> str:
        """One sentence about all of it."""
        bad, left_out, done = (len(self.of(o)) for o in ("failed", "skipped", "good"))
        if bad:
            return f"{bad} failed, {left_out} skipped, {done} good."
        if not done:
            return f"Nothing was examined: {left_out} skipped."
        if left_out:
            return f"Nothing failed, but {left_out} skipped and so unknown; {done} good."
        return f"All good: {done} of {done}."

    def text(self) -> str:
        """Returns the report as people read it: the worst first."""
        lines = [f"# {self.title}", "", self.verdict]
        for title, outcome in (("Failed", "failed"), ("Skipped", "skipped"), ("Good", "good")):
            listed = [finding for finding in self.findings if finding.outcome == outcome]
            if listed:
                lines += ["", f"## {title}", ""]
                lines += [line for finding in listed for line in _lines(finding)]
        lines += ["", "## Machine", "", *(f"- {line}" for line in _described(self.machine))]
        return "\n".join(lines) + "\n"

    def document(self) -> dict[str, Any]:
        """Returns the report as programs read it."""
        return {
            "version": VERSION,
            "title": self.title,
            "verdict": self.verdict,
            "machine": self.machine,
            "findings": [asdict(finding) for finding in self.findings],
        }

    def write(self, path: Path) -> None:
        """Writes a page for an issue: the text and, folded behind it, the same as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        data = json.dumps(self.document(), indent=1)
        folded = f"{SUMMARY}\n\n{FENCE}json\n{data}\n{FENCE}\n\n</details>\n"
        write_text(path, f"{self.text()}\n{folded}")


def read_findings(path: Path) -> Findings:
    """Returns what was written to a file."""
    data = path.read_text(encoding="utf-8").rpartition(f"{FENCE}json\n")[2]
    document = json.loads(data.rpartition(f"\n{FENCE}")[0])
    findings = [Finding(**finding) for finding in document["findings"]]
    return Findings(document["title"], document["machine"], findings)


def _lines(finding: Finding) -> Iterable[str]:
    """Yields an item of a list; what errors say stays as it is, below it."""
    first, *others = finding.detail.strip().splitlines() or [""]
    yield f"- **{finding.name}**: {first}"
    if others:
        yield from ("", f"  {FENCE}text", *(f"  {line}" for line in others), f"  {FENCE}", "")
    for name, value in finding.figures.items():
        yield f"    - {name}: {value}"


def _described(machine: dict[str, Any]) -> Iterable[str]:
    """Yields a line for each thing that is known about a machine."""
    for name, value in machine.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        if value not in (None, ""):
            yield f"{name.replace('_', ' ')}: {value}"
