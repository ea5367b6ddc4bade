"""Tells a user whose bags may be long that the planner does not know it.

Who had better pool a table depends on how many ids a bag has.  TorchRec's planner takes one where
nobody says more, and so does ours; a plan for bags of one id can be half as fast for long ones.
"""

import logging
from collections.abc import Mapping

from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder

from fusedrec_torchrec.planner.fit_tables import unowned_tables
from fusedrec_torchrec.sharding.shardable_modules import shardable_modules

__all__ = ["warn_of_unknown_bags"]

logger = logging.getLogger(__name__)

MOST_NAMES = 3


def warn_of_unknown_bags(
    module: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints] | None,
) -> None:
    """Warns if nobody has said how many ids the bags of some tables have.

    Args:
        module: the model.
        sharders: of its modules.
        constraints: the user's; whoever gives some for a table has thought of it.
    """
    unowned = unowned_tables(module, sharders)
    unknown = [
        name
        for _, child, sharder in shardable_modules(module, sharders)
        for name in sharder.shardable_parameters(child)
        if name not in unowned and name not in (constraints or {})
    ]
    if not unknown:
        return
    names = ", ".join(repr(name) for name in unknown[:MOST_NAMES])
    if len(unknown) > MOST_NAMES:
        names += f" and {len(unknown) - MOST_NAMES} more"
    logger.warning(
        "nobody has said how many ids a bag of %s has: the plan is for one. If there are more, "
        "pass profile=fusedrec_torchrec.profile_batches(model, [batch, ...]), which counts them in "
        "a few batches, or constraints={%r: ParameterConstraints(pooling_factors=[10.0]), ...}",
        *(names, unknown[0]),
    )
