"""Spells a setting as a user sets it: in Python, in a configuration, on a command line."""

from collections.abc import Callable

__all__ = ["Spelling", "as_argument", "as_flag", "as_setting"]

# Takes the name of a field and its value.
Spelling = Callable[[str, object], str]


def as_argument(field: str, value: object) -> str:
    """Spells a setting as in Python: ``on_bad_line='skip'``."""
    return f"{field}={value!r}"


def as_flag(field: str, value: object) -> str:
    """Spells a setting as on a command line: ``--on-bad-line skip``."""
    flag = f"--{field.replace('_', '-')}"
    return f"no {flag}" if value is None else f"{flag} {value}"


def as_setting(section: str) -> Spelling:
    """Spells settings as in a section of a file: ``data.criteo.on_bad_line: skip``."""

    def spell(field: str, value: object) -> str:
        return f"{section}.{field}: {'null' if value is None else value}"

    return spell
