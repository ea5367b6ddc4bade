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

Every setting of a training configuration. `*` stands for the number of a list item or a name.
This page is written by `python docs/configuration.py`.
"""


BENCH = """
# Benchmark suites

Every setting of a suite of `fusedrec bench`, such as those in `benchmarks/`.
"""


PLAN = """
# Planner configurations

Every setting of `fusedrec plan` and `fusedrec simulate`, such as `configs/planner/*.yaml`.
"""
CLUSTER = """
# Clusters

Every setting of a cluster file, such as `configs/clusters/*.yaml`.
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
