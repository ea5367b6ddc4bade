"""The library of the C++ operators as a file: how it is built, and whether a file is a whole one.

A folder holds the library and, beside it, a manifest with its size, its SHA-256 and the identity
of what it was built from.  Nothing is loaded that does not match its manifest: the dynamic loader
kills the process with a bus error if a library is cut short.

The build of a wheel loads this file by its path (``setup.py``), where the package cannot be
imported, so this file imports nothing of the package.
"""

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["BuildError", "Library", "UnusableLibraryError", "compiler", "identity"]

SOURCE = Path(__file__).with_name("ops.cpp")
# No contraction: a * b + c is rounded twice, as in torch's operators.
FLAGS = ("-O3", "-std=c++20", "-ffp-contract=off", "-fPIC", "-shared")
LIBRARIES = ("-lc10", "-ltorch_cpu")
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_SECONDS = 600


class UnusableLibraryError(Exception):
    """There is no library, or it must not be loaded; the text says why."""


class BuildError(Exception):
    """The library could not be built; the text says why."""


@cache
def identity() -> str:
    """Returns a digest of all that the library depends on: sources, flags, torch, platform.

    The library does not depend on Python, and any compiler of the platform will do.
    """
    import torch

    digest = hashlib.sha256()
    for path in sorted([SOURCE, *SOURCE.parent.glob("*.h")]):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    needs = [*FLAGS, *LIBRARIES, torch.__version__, torch.version.git_version, _abi()]
    digest.update(json.dumps([*needs, platform.system(), platform.machine()]).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Library:
    """The library in a folder (``path``) and its ``manifest``, if they are there."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "fusedrec_ops.so"

    @property
    def manifest(self) -> Path:
        return self.folder / "fusedrec_ops.json"

    def exists(self) -> bool:
        """Tells whether there is a file, whole or not."""
        return self.path.exists()

    def check(self) -> None:
        """Raises ``UnusableLibraryError`` unless the file is whole and was built for this torch."""
        try:
            manifest = json.loads(self.manifest.read_text())
            size, digest = manifest["size"], manifest["sha256"]
            built_for, built_with = manifest["identity"], manifest["torch"]
            content = self.path.read_bytes()
        except FileNotFoundError as error:
            raise UnusableLibraryError(f"{error.filename} does not exist") from None
        except OSError as error:
            raise UnusableLibraryError(
                f"{error.filename} cannot be read: {error.strerror}"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise UnusableLibraryError(f"{self.manifest} is damaged") from None
        if built_for != identity():
            import torch

            raise UnusableLibraryError(
                f"{self.path} was built for torch {built_with} or from other sources, and this is "
                f"torch {torch.__version__}"
            )
        if len(content) != size:
            raise UnusableLibraryError(f"{self.path} has {len(content)} bytes instead of {size}")
        if hashlib.sha256(content).hexdigest() != digest:
            raise UnusableLibraryError(f"{self.path} is damaged: its SHA-256 is not {digest}")

    def load(self) -> None:
        """Makes the operators known to torch, or raises ``UnusableLibraryError``."""
        import torch

        self.check()
        try:
            torch.ops.load_library(str(self.path))
        except OSError as error:  # such as a symbol that this machine's libraries do not have
            raise UnusableLibraryError(
                f"{self.path} does not load: {error.__cause__ or error}"
            ) from None

    def build(self) -> None:
        """Builds the library in place of what is there; nobody sees it half written.

        Only one process at a time may build into a folder.
        """
        import torch

        for left_over in self.folder.glob("build.*"):  # of a build that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="build.", dir=self.folder) as folder:
            built = Library(Path(folder))
            _compile(built.path)
            content = built.path.read_bytes()
            manifest = {
                "identity": identity(),
                "torch": torch.__version__,
                "size": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
            built.manifest.write_text(json.dumps(manifest, indent=1) + "\n")
            built.path.replace(self.path)
            built.manifest.replace(self.manifest)


def _abi() -> str:
    """Returns the flag for the strings and lists of the C++ library that torch was built with."""
    import torch

    return f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"


def compiler() -> list[str]:
    """Returns the compiler and its first arguments: ``CXX``, or what there is."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for name in wanted[:1] or COMPILERS:
        if program := shutil.which(name):
            return [program, *wanted[1:]]
    raise BuildError(
        f"CXX is {wanted[0]!r}, which is no program"
        if wanted
        else f"there is no C++ compiler: none of {', '.join(COMPILERS)} is on the PATH"
    )


def _compile(output: Path) -> None:
    """Calls the compiler, which is all that one source file takes."""
    import torch

    torch_folder = Path(torch.__file__).parent
    command = [
        *compiler(),
        *(*FLAGS, _abi(), f"-ffile-prefix-map={torch_folder}=torch"),
        *("-isystem", str(torch_folder / "include"), SOURCE.name),
        *(f"-L{torch_folder / 'lib'}", *LIBRARIES, "-o", str(output.absolute())),
    ]
    try:
        # In the folder of the source: with that and the prefix map, what is built does not depend
        # on where sources and torch are, and names no folder of this machine.
        done = subprocess.run(
            command,
            cwd=SOURCE.parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
        )
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} took more than {TIMEOUT_SECONDS} s") from None
    if done.returncode or not output.exists():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in lines if "error" in line), (lines or ["no message"])[-1])
        raise BuildError(f"{command[0]} failed with status {done.returncode}: {reason.strip()}")
