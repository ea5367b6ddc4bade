"""How many bytes codecs have saved."""

from dataclasses import dataclass

__all__ = ["Traffic"]


@dataclass
class Traffic:
    """What has been sent, to the own rank included.

    Attributes:
        plain: bytes that it would have been as float32.
        coded: bytes that it was.
    """

    plain: int = 0
    coded: int = 0
