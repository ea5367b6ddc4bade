"""What is wrong with lines or rows of a data set: counted and named, or an error."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fusedrec_torchrec.training.data.prepare_options import OnBadLine

__all__ = ["BadLines"]


@dataclass
class BadLines:
    """Collects what is wrong with the lines of a data set's text, or with the rows of its files.

    Attributes:
        policy: ``"error"`` raises at the first malformed line, ``"skip"`` counts and goes on.
        counts: lines by what is wrong with them.
        examples: the first few, as ``file:line: reason``.
        skip: how the policy ``"skip"`` is spelled where it can be set.
    """

    policy: OnBadLine = "error"
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    skip: str = "on_bad_line='skip'"

    MAX_EXAMPLES = 20

    @property
    def total(self) -> int:
        """Number of malformed lines."""
        return sum(self.counts.values())

    def add(self, path: Path, line: int | str, kind: str, detail: str) -> None:
        """Counts a malformed line, or raises a ``ValueError``, as the policy says."""
        text = f"{path}:{line}: {detail}"
        if self.policy == "error":
            raise ValueError(f"{text} (to skip and count malformed lines, use {self.skip})")
        self.counts[kind] += 1
        if len(self.examples) < self.MAX_EXAMPLES:
            self.examples.append(text)
