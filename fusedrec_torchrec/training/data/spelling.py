"""How a setting is spelled where a user can set it: in Python, in a configuration, on a command."""

from collections.abc import Callable

__all__ = ["Spelling", "as_argument", "as_flag", "as_setting"]

# Of the name of a field and a value of it.
Spelling = Callable[[str, object], str]


def as_argument(field: str, value: object) -> str:
    """In Python: ``on_bad_line='skip'``."""
    return f"{field}={value!r}"


def as_flag(field: str, value: object) -> str:
    """On a command line: ``--on-bad-line skip``; what is not given has no value."""
    flag = f"--{field.replace('_', '-')}"
    return f"no {flag}" if value is None else f"{flag} {value}"


def as_setting(section: str) -> Spelling:
    """In a section of a configuration file: ``data.criteo.on_bad_line: skip``."""

    def spell(field: str, value: object) -> str:
        return f"{section}.{field}: {'null' if value is None else value}"

    return spell
