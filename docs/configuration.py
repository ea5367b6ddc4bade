"""Writes docs/configuration.md from the configuration's own descriptions."""

import sys
from pathlib import Path

from fusedrec_torchrec.config import options
from fusedrec_torchrec.training.config import TrainConfig

HEAD = """# Configuration

Every setting of a training configuration. `*` stands for the number of a list item or a name.
This page is written by `python docs/configuration.py`.
"""


def document() -> str:
    lines = [HEAD]
    section = None
    for option in options(TrainConfig):
        name, dot, _ = option.path.partition(".")
        title = name if dot or option.path == "tables" else "the run"
        if title != section:
            section = title
            lines += [f"## {title}", "", "| setting | type | default | |", "|---|---|---|---|"]
        cells = (f"`{option.path}`", option.type, f"`{option.default}`", option.description)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    text = "\n".join(lines) + "\n"
    return text.replace("\n## ", "\n\n## ").replace("\n\n\n", "\n\n")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".md")
    target.write_text(document())
