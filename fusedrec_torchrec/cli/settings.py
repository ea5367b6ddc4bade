"""Lists the settings of a configuration file, for ``--help``."""

import argparse
import textwrap
from typing import Any

from fusedrec_torchrec.core.config import options

__all__ = ["settings_help"]


def settings_help(config: type[Any]) -> dict[str, Any]:
    """Returns arguments of a parser whose help lists all settings of a configuration."""
    lines = []
    for option in options(config):
        lines.append(f"  {option.path}: {option.type} = {option.default}")
        lines += textwrap.wrap(
            option.description, 92, initial_indent=" " * 6, subsequent_indent=" " * 6
        )
    return {
        "epilog": "settings of the configuration file, and of --set:\n\n" + "\n".join(lines),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
