"""Finds what is wrong with the sharding of a run, as far as it can be found without torch."""

from collections.abc import Iterator, Mapping

from fusedrec_torchrec.hot.options import HotOptions
from fusedrec_torchrec.hot.rule_checks import check_counts, checked_ids
from fusedrec_torchrec.sharding.plan_file import read_plan
from fusedrec_torchrec.sharding.sharding_type import FUSED, FUSED_TYPES
from fusedrec_torchrec.training.config import TrainConfig

__all__ = ["check_sharding", "tables_named"]

MAY_BE_FUSED = (*FUSED_TYPES, "auto")
MAY_BE_HOT = (FUSED, "auto")


def check_sharding(config: TrainConfig, table_rows: Mapping[str, int]) -> None:
    """Checks the sharding of a run whose settings name tables and files that exist.

    Args:
        config: of the run.
        table_rows: rows of each table of the data.

    Raises:
        ValueError: a setting names a table that is not fused, or rows that the table does not have;
            or the plan file is for other ranks or for other tables.
    """
    shardings = _planned(config, table_rows)
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
    _check_hot_rows(config.sharding.hot, table_rows)


def tables_named(config: TrainConfig) -> Iterator[tuple[str, list[str]]]:
    """Yields settings that name tables, with the names."""
    sharding = config.sharding
    hashed = sharding.exchange.hash_ids
    yield "sharding.tables", list(sharding.tables)
    yield "sharding.exchange.hash_ids", [] if isinstance(hashed, bool) else list(hashed)
    yield "sharding.exchange.table_codecs", list(sharding.exchange.table_codecs)
    yield "sharding.hot.tables", list(sharding.hot.tables)


def _planned(config: TrainConfig, table_rows: Mapping[str, int]) -> dict[str, str]:
    """Returns the sharding of each table, as far as it is known before the planner decides."""
    sharding = config.sharding
    if config.plan is None:
        return {name: sharding.tables.get(name, sharding.type) for name in table_rows}
    planned, _ = read_plan(config.plan)
    planned.check_ranks(config.launch.ranks * config.launch.nodes, str(config.plan))
    planned.check_tables(table_rows, str(config.plan))
    return {name: planned.tables[name].sharding for name in table_rows}


def _check_hot_rows(hot: HotOptions, table_rows: Mapping[str, int]) -> None:
    for name, rule in hot.tables.items():
        where = f"sharding.hot.tables.{name}"
        if rule.ids is not None:
            checked_ids(rule.ids, table_rows[name], where)
        else:
            check_counts(rule, hot, where)
    if hot.rule is not None and set(table_rows) - set(hot.tables):
        check_counts(hot.rule, hot, "sharding.hot.rule")
