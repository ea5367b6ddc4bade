"""A sharding option of TorchRec's search as the cost model sees its table.

Nothing is known here of the access distribution: ids are taken to be uniform over a table's rows,
which is the worst case for dedup.
"""

from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.distributed.planner.utils import get_num_poolings

from fusedrec_torchrec.access.row_classes import RowClasses
from fusedrec_torchrec.planner.cost.table_load import TableLoad
from fusedrec_torchrec.planner.fit_tables import is_weighted
from fusedrec_torchrec.sharding.sharding_type import FUSED_TYPES

__all__ = ["is_fused", "option_load"]


def is_fused(option: ShardingOption) -> bool:
    """Returns whether a sharding option is one of ours."""
    return option.sharding_type in FUSED_TYPES


def option_load(
    option: ShardingOption, constraints: dict[str, ParameterConstraints] | None
) -> TableLoad:
    """Returns what a batch of one rank asks of an option's table, as if it were a single sample.

    Features may have batch sizes of their own, so that there is no number of samples.
    """
    mine = (constraints or {}).get(option.name)
    poolings = get_num_poolings(constraints, option)
    batch_sizes = (mine.batch_sizes if mine else None) or [option.batch_size] * len(poolings)
    rows, dim = option.tensor.shape
    ids = sum(
        length * pooling * batch
        for length, pooling, batch in zip(option.input_lengths, poolings, batch_sizes, strict=True)
    )
    return TableLoad(
        name=option.name,
        rows=rows,
        dim=dim,
        pooling=ids,
        classes=RowClasses.uniform(rows),
        bags=sum(pooling * batch for pooling, batch in zip(poolings, batch_sizes, strict=True)),
        pooled=option.is_pooled,
        element_bytes=option.tensor.element_size(),
        weighted=is_weighted(option.module[1]),
    )
