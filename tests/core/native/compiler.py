"""A compiler that takes no time: it hands out the library that was compiled before.

What the tests that use it are about is what happens around the compiler.
"""

import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusedrec_torchrec.core import native
from fusedrec_torchrec.core.native.library import Library
from tests.core.native.fresh import Running, start_loading

needs_operators = pytest.mark.skipif(not native.available(), reason="needs a C++ compiler")


def compiled() -> Library:
    """The library that this process has loaded."""
    return Library(Path(native.operators().explanation).parent)


def quick_compiler(folder: Path, before: str = "") -> dict[str, str]:
    """The environment for a compiler that notes its calls in ``calls`` and may do more before."""
    script = folder / "compiler"
    script.write_text(
        "#!/bin/sh\n"
        f"echo call >> {shlex.quote(str(folder / 'calls'))}\n"
        f"{before}\n"
        'while [ "$1" != -o ]; do shift; done\n'
        f'cp {shlex.quote(str(compiled().path))} "$2"\n'
    )
    script.chmod(0o755)
    return {"CXX": str(script), "TORCH_EXTENSIONS_DIR": str(folder / "cache")}


@contextmanager
def paused(folder: Path) -> Iterator[tuple[Running, dict[str, str]]]:
    """A process in the middle of a build; its compiler goes on when the block ends."""
    started, goes_on = folder / "started", folder / "goes_on"
    os.mkfifo(started)
    os.mkfifo(goes_on)
    environment = quick_compiler(folder, before=f"echo yes > {started}; cat {goes_on}")
    running = start_loading(**environment)
    with started.open() as pipe:
        assert pipe.readline() == "yes\n"
    try:
        yield running, environment
    finally:
        goes_on.open("w").close()


def cached(folder: Path) -> Library:
    """A copy of the library in the cache of ``quick_compiler``'s environment."""
    library = compiled()
    copy = Library(folder / "cache" / native._cache_folder().name)
    copy.folder.mkdir(parents=True)
    shutil.copy(library.path, copy.path)
    shutil.copy(library.manifest, copy.manifest)
    return copy
