"""Counts the bytes that codecs have saved."""

from dataclasses import dataclass

__all__ = ["Traffic"]


@dataclass
class Traffic:
    """The bytes that a rank has sent, to itself included, without and with its codecs.

    Attributes:
        plain: bytes of what was sent if it had been float32.
        coded: bytes that were sent.
    """

    plain: int = 0
    coded: int = 0

    def add(self, plain: int, coded: int) -> None:
        """Counts what was sent."""
        self.plain += plain
        self.coded += coded

    def reset(self) -> None:
        """Begins to count anew."""
        self.plain = self.coded = 0
