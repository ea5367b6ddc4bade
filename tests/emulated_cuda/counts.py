"""Counts what a piece of code asks of an emulated device."""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.emulated_cuda import device
from tests.emulated_cuda.device import Event

__all__ = ["Counts", "SyncPlaces", "counted", "place"]

LIBRARIES = ("fusedrec_torchrec", "torchrec", "fbgemm_gpu")
MOST_FRAMES = 3


@dataclass
class Counts:
    """What happened while it was counted.

    Attributes:
        events: all of it, in order.
        sync_places: where in the Python code the host waited for the device, and how often.
    """

    events: list[Event] = field(default_factory=list)
    sync_places: Counter[str] = field(default_factory=Counter)

    def of(self, kind: str) -> list[Event]:
        """Returns the events of a kind."""
        return [event for event in self.events if event.kind == kind]

    @property
    def kernels(self) -> int:
        """Kernels that were launched."""
        return len(self.of("kernel"))

    @property
    def syncs(self) -> int:
        """How often the host waited for the device."""
        return len(self.of("sync"))

    @property
    def pageable_copies(self) -> int:
        """Copies from or to memory that is not pinned; the host stages or waits for them."""
        return sum("pageable" in event.detail for event in self.of("copy"))

    @property
    def collectives(self) -> int:
        """Collectives of tensors on the device."""
        return len(self.of("collective"))

    def kernel_names(self) -> Counter[str]:
        """Returns how often each kernel was launched, by its mangled name."""
        return Counter(event.detail for event in self.of("kernel"))


class SyncPlaces:
    """Who waits for the device, by lines of code; the oracle asks around every operator."""

    places: Counter[str] | None = None  # None while nobody counts

    @classmethod
    @contextmanager
    def watch(cls, operator: str) -> Iterator[None]:
        """Notes where the code stands if the operator waits for the device."""
        if cls.places is None:
            yield
            return
        first = device.number_of_events()
        yield
        waits = sum(event.kind == "sync" for event in device.events(first))
        if waits:
            cls.places[f"{operator}: {place()}"] += waits


def place() -> str:
    """Returns the innermost lines of our code and of TorchRec's and FBGEMM's."""
    lines: list[str] = []
    for frame, line in traceback.walk_stack(None):
        name = frame.f_code.co_filename
        library = next((library for library in LIBRARIES if f"/{library}/" in name), None)
        if library is not None:
            lines.append(f"{library}/{name.rpartition(f'/{library}/')[2]}:{line}")
            if len(lines) == MOST_FRAMES:
                break
    return " < ".join(lines) or "elsewhere"


@contextmanager
def counted() -> Iterator[Counts]:
    """Counts what happens inside; the counts are there when it ends.

    Not inside of itself, and only with ``install`` done, in the same process.
    """
    counts = Counts()
    SyncPlaces.places = counts.sync_places
    device.record(True)
    try:
        yield counts
    finally:
        device.record(False)
        SyncPlaces.places = None
        counts.events = device.events()
