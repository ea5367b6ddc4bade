"""What the emulated runtime was asked to do: its events."""

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["FOLDER_VARIABLE", "Event", "events", "mark", "number_of_events", "record"]

FOLDER_VARIABLE = "CUDA_EMULATOR"  # where its libraries are; it is set where there is one


@dataclass(frozen=True)
class Event:
    """Something that the host asked of the emulated device.

    Attributes:
        kind: ``kernel``, ``copy``, ``memset``, ``sync``, ``event``, ``wait``, ``allocate``,
            ``free``; of the oracle ``collective``.
        detail: the kernel's name, a copy's way (``pageable>device``), who waits.
        size: bytes; of a kernel, its blocks.
        stream: the handle of its stream, 0 for the default stream.
        device: the number of the device that was current.
    """

    kind: str
    detail: str
    size: int
    stream: int
    device: int


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(Path(os.environ[FOLDER_VARIABLE]) / "libcuda_emulator.so"))
    library.emulator_what.restype = ctypes.c_char_p
    library.emulator_size.restype = ctypes.c_long
    library.emulator_bytes.restype = ctypes.c_long
    library.emulator_stream.restype = ctypes.c_ulong
    for what in ("what", "bytes", "stream", "device"):
        getattr(library, f"emulator_{what}").argtypes = [ctypes.c_long]
    return library


def record(on: bool) -> None:
    """Begins to write events down, forgetting those before, or stops."""
    _library().emulator_record(int(on))


def number_of_events() -> int:
    """Returns how many events were written down."""
    number: int = _library().emulator_size()
    return number


def events(first: int = 0) -> list[Event]:
    """Returns what was written down, from the ``first`` one on."""
    library, found = _library(), []
    for i in range(first, number_of_events()):
        kind, _, detail = library.emulator_what(i).decode().partition(" ")
        size, stream = library.emulator_bytes(i), library.emulator_stream(i)
        found.append(Event(kind, detail, size, stream, library.emulator_device(i)))
    return found


def mark(kind: str, detail: str) -> None:
    """Writes down an event of the oracle's own."""
    _library().emulator_mark(f"{kind} {detail}".encode())
