"""Opens files of a folder that somebody else made, and nothing outside of it.

A checkpoint or a prepared data set names its files itself.  Such a name must be the name of a
regular file in the same folder.  A symbolic link is followed if it leads to a file of that folder;
the folder itself may be a link.
"""

import io
import os
import reprlib
import stat
from datetime import date
from pathlib import Path, PurePath

__all__ = ["check_file_name", "open_in_folder", "read_in_folder", "shown"]

MOST_SHOWN = 120  # characters of a text
LONGEST_SHOWN = 400  # characters of a container


class _Shown(reprlib.Repr):
    """Shows texts, numbers and small containers; of anything else only its type."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxlist = self.maxtuple = self.maxdict = 16
        self.maxstring = MOST_SHOWN

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() < MOST_SHOWN else f"a number of {x.bit_length()} bits"

    def repr_instance(self, x: object, level: int) -> str:
        if x is None or isinstance(x, bool | float | date | PurePath):
            return repr(x)
        return f"a {type(x).__name__}"


def shown(value: object) -> str:
    """Returns what a file says as it can stand in a message: escaped, and not without end."""
    text = _Shown().repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def check_file_name(name: object, source: object) -> str:
    """Checks that a name can be that of a file in a folder, and returns it.

    Raises:
        ValueError: it leads elsewhere, or is no name; ``source`` is who names it.
    """
    is_name = isinstance(name, str) and name.isprintable() and "/" not in name
    if not is_name or name in ("", ".", ".."):
        raise ValueError(f"{source} names {shown(name)}, which is no file in its folder")
    assert isinstance(name, str)
    return name


def open_in_folder(folder: Path, name: str) -> io.BufferedReader:
    """Opens a regular file of a folder for reading.

    Raises:
        OSError: it is not there, or cannot be opened.
        ValueError: it is not in the folder, or is no regular file.
    """
    path = folder / check_file_name(name, folder)
    if path.is_symlink():
        path = path.resolve(strict=True)
        if path.parent != folder.resolve():
            raise ValueError(
                f"{folder / name} is a link to {path}, which is outside of the folder: copy the "
                "file instead"
            )
    # Opening a pipe would wait for somebody who writes into it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is no regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_in_folder(folder: Path, name: str, most: int) -> bytes:
    """Returns the content of a regular file of a folder.

    Raises:
        OSError: it is not there, or cannot be read.
        ValueError: it is not in the folder, is no regular file, or has more than ``most`` bytes.
    """
    with open_in_folder(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{folder / name} has {size} bytes, may have {most}")
        return file.read(most)
