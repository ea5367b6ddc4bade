"""Finds what is wrong with the plan file of a run, before any rank starts."""

import torch

from fusedrec_torchrec.access.samples import Source
from fusedrec_torchrec.sharding.plan_conversion import sharding_plan_of
from fusedrec_torchrec.sharding.plan_file import read_plan
from fusedrec_torchrec.sharding.sharders import fused_sharders
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.model import build_model

__all__ = ["check_plan"]


def check_plan(config: TrainConfig, source: Source, device: str) -> None:
    """Checks that the plan file of a run, if it has one, is for its model and device.

    Args:
        config: of the run, checked by ``open_data``.
        source: its data, which has the tables.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: the plan is for another device, or for tables of other sizes.
    """
    if config.plan is None:
        return
    planned, hot_set = read_plan(config.plan)
    planned.check_device(device, str(config.plan))
    model = build_model(config.model, source, torch.device("meta"))
    sharding_plan_of(planned, hot_set, model, fused_sharders(), str(config.plan))
