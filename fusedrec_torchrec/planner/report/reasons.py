"""Why a fused table is pooled where it is, in words: distinct rows against distinct bags."""

from fusedrec_torchrec.core.terminal import human_bytes
from fusedrec_torchrec.planner.cost.table_load import NUMBER_BYTES, TableLoad
from fusedrec_torchrec.sharding.sharding_type import FUSED, OWNER_POOLED

__all__ = ["fewest_rows_travel", "rows_and_bags"]


def fewest_rows_travel(system: str, table: TableLoad, batch: int) -> str | None:
    """Returns how many rows of a pooled table travel and would otherwise; None if more do.

    Args:
        system: a fused sharding of the table.
        table: what is asked of it.
        batch: samples of a rank.
    """
    rows, bags = table.unique(batch), table.distinct_bags(batch).bags
    sent = f"{human_bytes(min(bags, rows) * table.dim * NUMBER_BYTES)} of rows"
    if system in OWNER_POOLED and not table.has_more_bags(batch):
        than = "are fewer than" if table.has_fewer_bags(batch) else "are as many as"
        return f"{bags:,.0f} distinct bags {than} {rows:,.0f} distinct rows: {sent}"
    if system == FUSED and not table.has_fewer_bags(batch):
        return f"{rows:,.0f} distinct rows are no more than {bags:,.0f} distinct bags: {sent}"
    return None


def rows_and_bags(system: str, table: TableLoad, batch: int) -> str:
    """Returns what travels for a pooled table though the other would be fewer."""
    rows, bags = table.unique(batch), table.distinct_bags(batch).bags
    if system in OWNER_POOLED:
        return f"{bags:,.0f} distinct bags, though {rows:,.0f} distinct rows"
    return f"{rows:,.0f} distinct rows, though {bags:,.0f} distinct bags"
