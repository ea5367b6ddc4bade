"""Small C++ operators for the hot loops on CPU, and how they are found.

They come from the first of these places that has them:

1. the package itself, if its wheel was built with them and for this version of torch;
2. the cache, a folder in ``TORCH_EXTENSIONS_DIR`` or ``~/.cache/torch_extensions`` whose name
   stands for the sources, the flags, the version of torch and the platform;
3. the compiler, which builds them into the cache: ``CXX``, or the first of c++, g++ and clang++.

Without them, or with ``FUSEDREC_NATIVE=0``, the same results come from torch's own operators, more
slowly (docs/performance_details.md has the figures); sums of float32 may then differ in the last
bit, because they run in another order.

Files, in reading order:

- ``ops.cpp``: the list of the operators; ``common.h``: what all headers need;
- ``checks.h``: operators check what they are given, and raise a ``RuntimeError`` that names them;
- ``bags.h``, ``keys.h``, ``dedup.h``, ``row_numbers.h``, ``messages.h``, ``sums.h``: the stages
  of the data path;
- ``dct.h``: the entries that reach a threshold;
- ``library``: the library as a file: how it is built, and whether it is whole.
"""

import logging
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from fusedrec_torchrec.core.files import file_lock
from fusedrec_torchrec.core.native.library import (
    BuildError,
    Library,
    UnusableLibraryError,
    identity,
)

__all__ = ["Operators", "available", "available_on", "identity", "operators"]

logger = logging.getLogger(__name__)

BUILT_IN = Path(__file__).with_name("built")
ROOT = "~/.cache/torch_extensions"


@dataclass(frozen=True)
class Operators:
    """The place that the operators of this process come from.

    Attributes:
        origin: "none" if torch's own operators are used.
        explanation: the library, or why there is none.
    """

    origin: Literal["built in", "cached", "built now", "none"]
    explanation: str

    def __str__(self) -> str:
        return f"{self.origin} ({self.explanation})"


@cache
def operators() -> Operators:
    """Loads the operators on the first call, and builds them on the first call on a machine."""
    if os.environ.get("FUSEDREC_NATIVE", "1") == "0":
        return Operators("none", "FUSEDREC_NATIVE=0")
    try:
        return _built_in() or _cached_or_built()
    except Exception as error:  # no compiler, no folder to write to: all are fine
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        logger.warning(
            "the C++ operators could not be built (%s); using torch's own, which are slower. "
            "FUSEDREC_NATIVE=0 silences this",
            reason,
        )
        return Operators("none", reason)


def available() -> bool:
    """Tells whether ``torch.ops.fusedrec`` is there; see ``operators``."""
    return operators().origin != "none"


def available_on(device: torch.device) -> bool:
    """Tells whether the operators can be used for tensors on a device."""
    return device.type == "cpu" and available()


def _built_in() -> Operators | None:
    library = Library(BUILT_IN)
    if not library.exists():
        return None
    try:
        library.load()
    except UnusableLibraryError as error:
        logger.warning("the C++ operators of the wheel cannot be used: %s", error)
        return None
    return Operators("built in", str(library.path))


def _cached_or_built() -> Operators:
    library = Library(_cache_folder())
    cached = Operators("cached", str(library.path))
    try:
        library.load()  # needs neither a lock nor a folder to write to
        return cached
    except UnusableLibraryError:
        pass
    try:
        library.folder.mkdir(parents=True, exist_ok=True)
        # The lock dies with its process, so a build that was killed is in nobody's way.
        with file_lock(library.folder / "fusedrec.lock"):
            try:
                library.load()  # another process may have built it in the meantime
                return cached
            except UnusableLibraryError as error:
                if library.exists():
                    logger.warning("the C++ operators are built anew: %s", error)
            library.build()
            library.load()
    except OSError as error:
        raise BuildError(
            f"{library.folder} cannot be written: {error.strerror}; TORCH_EXTENSIONS_DIR may name "
            "another folder"
        ) from error
    return Operators("built now", str(library.path))


def _cache_folder() -> Path:
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or ROOT).expanduser()
    return root / f"fusedrec_native_{identity()[:16]}"
