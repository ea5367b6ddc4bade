"""Lists the settings of a configuration file, for ``--help``."""

import textwrap
from typing import Any

from fusedrec_torchrec.core.config import options

__all__ = ["settings_help"]


def settings_help(config: type[Any]) -> str:
    """Returns all settings of a configuration with their types, defaults and descriptions."""
    lines = []
    for option in options(config):
        lines.append(f"  {option.path}: {option.type} = {option.default}")
        lines += textwrap.wrap(
            option.description, 92, initial_indent=" " * 6, subsequent_indent=" " * 6
        )
    return "settings of the configuration file, and of --set:\n\n" + "\n".join(lines)
