"""Writes docs/configuration.md from the configuration's own descriptions."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fusedrec_torchrec.bench.suite import SuiteConfig
from fusedrec_torchrec.core.config import options
from fusedrec_torchrec.planner.config import PlannerConfig
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig
from fusedrec_torchrec.training.config import TrainConfig

HEAD = """# Configuration

This page lists every setting of every kind of configuration file: of a training (first), of
[planner configurations](#planner-configurations), [clusters](#clusters) and
[benchmark suites](#benchmark-suites).

A file is YAML. What it leaves out has its default, and a key that does not exist is refused. On
the command line, `--set section.key=value` overrides one setting. In the names below, `*` stands
for the number of a list item or for a name. `fusedrec train --help`, and the help of the other
commands, shows the same in the terminal.

This page is written by `python docs/configuration.py` from the descriptions in the code.
"""


BENCH = """
# Benchmark suites

These are the settings of a suite of `fusedrec bench`, such as those in `benchmarks/`.
"""


PLAN = """
# Planner configurations

These are the settings of `fusedrec plan` and `fusedrec simulate`. `configs/planner/` has files that
run as they are.
"""
CLUSTER = """
# Clusters

These are the settings of a cluster file, such as those in `configs/clusters/`. `fusedrec calibrate`
writes one for your machines.
"""


def document() -> str:
    """Returns the text of docs/configuration.md."""
    lines = [HEAD, *sections(TrainConfig, "the run")]
    lines += [PLAN, *sections(PlannerConfig, "the plan")]
    lines += [CLUSTER, *sections(ClusterConfig, "the cluster")]
    lines += [BENCH, *sections(SuiteConfig, "the suite")]
    text = "\n".join(lines) + "\n"
    return text.replace("\n## ", "\n\n## ").replace("\n\n\n", "\n\n")


def sections(config: type[Any], top: str) -> Iterator[str]:
    """Yields lines of a table for each section; settings outside of sections are under ``top``."""
    section = None
    for option in options(config):
        name, dot, _ = option.path.partition(".")
        title = name if dot or option.path in ("tables", "workloads") else top
        if title != section:
            section = title
            yield from (f"## {title}", "", "| setting | type | default | |", "|---|---|---|---|")
        cells = (f"`{option.path}`", option.type, f"`{option.default}`", option.description)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".md")
    target.write_text(document())
