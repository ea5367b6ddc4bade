"""Takes out of a text what says whose machine it is from, so that it can be shown to anybody."""

import contextlib
import getpass
import re
import socket
from pathlib import Path

__all__ = ["without_names"]


def without_names(text: str) -> str:
    """Returns a text with placeholders for the working directory, the home folder, host and user.

    Names are replaced where they stand as words: a user ``ann`` does not change ``channel``.
    """
    for folder, placeholder in _folders():
        text = re.sub(rf"{re.escape(folder)}(?!\.?[\w-])", placeholder, text)
    for name, placeholder in _names():
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", placeholder, text)
    return text


def _folders() -> list[tuple[str, str]]:
    """Returns the folders that are private, the longer ones first: one may lie in the other."""
    folders = [(str(Path.cwd()), "<here>"), (str(_home()), "<home>")]
    return sorted((pair for pair in folders if pair[0] != "/"), key=lambda pair: -len(pair[0]))


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # there is no user of this number, as in some containers
        return Path("/")


def _names() -> list[tuple[str, str]]:
    """Returns the names of host and user."""
    host = socket.gethostname()
    names = [(host, "<host>"), (host.partition(".")[0], "<host>")]
    with contextlib.suppress(KeyError, OSError):  # there is no user of this number
        names.append((getpass.getuser(), "<user>"))
    return [(name, placeholder) for name, placeholder in names if name]
