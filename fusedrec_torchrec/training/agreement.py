"""Compares what the ranks of a training must have in common, before it starts.

Every machine reads its own copy of the configuration and of the data.
"""

import torch

from fusedrec_torchrec.access.samples import Source
from fusedrec_torchrec.core.config import to_mapping
from fusedrec_torchrec.core.fingerprint import Facts, check_same_on_all_ranks, facts_of
from fusedrec_torchrec.training.config import TrainConfig

__all__ = ["check_same_configuration"]

# How a machine takes part, and where it finds files; what is in them is compared elsewhere.
OF_A_MACHINE = (
    *("launch", "logging.directory", "plan", "data.criteo.files", "data.criteo.prepared"),
    *("data.table.files", "data.table.prepared", "data.table.split.files"),
    *("sharding.hot.hot_set", "sharding.hot.profile"),
)


def check_same_configuration(config: TrainConfig, source: Source) -> None:
    """Compares configuration and data with those of all ranks; all ranks must call it.

    Raises:
        ValueError: on all ranks, naming what differs on which of them.
    """
    facts: Facts = facts_of("data of the run", source.identity)
    for name, value in to_mapping(config).items():
        facts |= facts_of(name, value)
    compared = {
        name: text
        for name, text in facts.items()
        if not any(name == own or name.startswith(f"{own}.") for own in OF_A_MACHINE)
    }
    check_same_on_all_ranks("the configuration", compared, None, torch.device("cpu"))
