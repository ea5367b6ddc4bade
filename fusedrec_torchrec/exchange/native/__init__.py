"""Small C++ operators for the hot loops on CPU, built when they are first wanted.

They need a C++ compiler and ninja.  Without these, or with ``FUSEDREC_NATIVE=0``, the same
results come from torch's own operators, more slowly (docs/performance.md has the figures); sums
of float32 may then differ in the last bit, because they run in another order.

The build goes to the folder of torch's extensions, ``TORCH_EXTENSIONS_DIR`` or
``~/.cache/torch_extensions``, once for each version of the source and of torch.
"""

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from platform import machine

import torch

from fusedrec_torchrec.files import locked

__all__ = ["available", "available_on", "source_version"]

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("ops.cpp")
# No contraction: a * b + c is rounded twice, as in torch's operators.
FLAGS = ["-O3", "-std=c++20", "-ffp-contract=off"]
ROOT = "~/.cache/torch_extensions"


@cache
def available() -> bool:
    """Whether ``torch.ops.fusedrec`` is there; builds it on the first call on a machine."""
    if os.environ.get("FUSEDREC_NATIVE", "1") == "0":
        return False
    try:
        _build_and_load()
    except Exception as error:  # no compiler, no ninja, no writable folder: all are fine
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        logger.warning(
            "the C++ operators could not be built (%s); using torch's own, which are slower. "
            "FUSEDREC_NATIVE=0 silences this",
            first_line,
        )
        return False
    return True


def available_on(device: torch.device) -> bool:
    """Whether the operators can be used for tensors on a device."""
    return device.type == "cpu" and available()


def source_version() -> str:
    """Tells the operators of one release from those of another, whether they are built or not."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]


def _build_and_load() -> None:
    from torch.utils.cpp_extension import load

    identity = hashlib.sha256(SOURCE.read_bytes())
    # The path, too: the build names it, and two checkouts would build over each other.
    identity.update(" ".join([str(SOURCE), torch.__version__, machine(), *FLAGS]).encode())
    name = f"fusedrec_native_{identity.hexdigest()[:12]}"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or ROOT).expanduser()
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        load(
            name=name,
            sources=[str(SOURCE)],
            extra_cflags=FLAGS,
            build_directory=str(folder),
            is_python_module=False,
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time.

    torch has a lock of its own, a file that stays behind when its process is killed, and everyone
    waits forever.  Under this lock, which dies with its process, such a file can only be a relic.
    """
    with locked(folder / "fusedrec.lock"):
        (folder / "lock").unlink(missing_ok=True)
        yield
