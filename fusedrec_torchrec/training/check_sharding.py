"""Finds what is wrong with the sharding of a run, before any rank starts."""

from collections.abc import Mapping

import torch

from fusedrec_torchrec.access.samples import Source
from fusedrec_torchrec.hot.choose import check_counts, checked_ids
from fusedrec_torchrec.hot.options import HotOptions
from fusedrec_torchrec.sharding.plan_file import read_plan, sharding_plan_of
from fusedrec_torchrec.sharding.sharders import fused_sharders
from fusedrec_torchrec.sharding.sharding_type import FUSED, FUSED_TYPES
from fusedrec_torchrec.training.checks import tables_named
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.model import build_model

__all__ = ["check_sharding"]

MAY_BE_FUSED = (*FUSED_TYPES, "auto")
MAY_BE_HOT = (FUSED, "auto")


def check_sharding(config: TrainConfig, source: Source, device: str) -> None:
    """Checks the sharding of a run whose tables and files are known to exist.

    Args:
        config: of the run, checked by ``open_data``.
        source: its data, which has the tables.
        device: ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: a setting names a table that is not fused, or rows that the table does not have;
            or the plan file is for other ranks or for other tables.
    """
    shardings = _planned(config, source, device)
    hot = config.sharding.hot
    if not any(kind in MAY_BE_FUSED for kind in shardings.values()):
        return  # settings of fused tables are of no use, but do no harm
    for setting, tables in tables_named(config):
        possible = MAY_BE_HOT if setting.startswith("sharding.hot") else MAY_BE_FUSED
        for name in tables:
            if setting != "sharding.tables" and shardings[name] not in possible:
                raise ValueError(
                    f"{setting} names {name!r}, whose sharding is {shardings[name]}, must be "
                    f"{' or '.join(possible)}"
                )
    _check_hot_rows(hot, source.table_rows)


def _planned(config: TrainConfig, source: Source, device: str) -> dict[str, str]:
    """Returns the sharding of each table, as far as it is known before the planner decides."""
    sharding = config.sharding
    if config.plan is None:
        return {name: sharding.tables.get(name, sharding.type) for name in source.table_rows}
    planned, hot_set = read_plan(config.plan)
    planned.check(config.launch.ranks * config.launch.nodes, device, str(config.plan))
    model = build_model(config.model, source, torch.device("meta"))
    sharding_plan_of(planned, hot_set, model, fused_sharders(), str(config.plan))
    return {name: planned.tables[name].sharding for name in source.table_rows}


def _check_hot_rows(hot: HotOptions, table_rows: Mapping[str, int]) -> None:
    for name, rule in hot.tables.items():
        where = f"sharding.hot.tables.{name}"
        if rule.ids is not None:
            checked_ids(rule.ids, table_rows[name], where)
        else:
            check_counts(rule, hot, where)
    if hot.rule is not None and set(table_rows) - set(hot.tables):
        check_counts(hot.rule, hot, "sharding.hot.rule")
