"""TorchRec's constraints on single tables, as a search of the cost model obeys them."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from torchrec.distributed.planner.types import ParameterConstraints

from fusedrec_torchrec.planner.cost.step import STOCK
from fusedrec_torchrec.planner.search.search_config import SearchConfig
from fusedrec_torchrec.sharding.sharding_type import FUSED_TYPES

__all__ = ["constrained_search"]

KNOWN_CONSTRAINTS = ("sharding_types", "pooling_factors", "compute_kernels")


def constrained_search(
    search: SearchConfig, constraints: Mapping[str, ParameterConstraints]
) -> SearchConfig:
    """Returns the search within TorchRec's constraints.

    Raises:
        ValueError: they contradict each other, or ask for what has no price.
    """
    tables: dict[str, Any] = dict(search.tables)
    default = ParameterConstraints()
    for name, constraint in constraints.items():
        for field in fields(constraint):
            is_default = getattr(constraint, field.name) == getattr(default, field.name)
            if field.name not in KNOWN_CONSTRAINTS and not is_default:
                raise ValueError(
                    f"constraints of table {name!r} set {field.name}, which the cost model does "
                    f"not know; it knows {', '.join(KNOWN_CONSTRAINTS)}.  Without cluster, "
                    "TorchRec's own search obeys it"
                )
        kernels = constraint.compute_kernels
        if kernels and not {"fused", "dense"} & set(kernels):
            raise ValueError(
                f"constraints of table {name!r} ask for compute_kernels {kernels}; the cost model "
                "takes fused, and host memory where devices are full.  Without cluster, TorchRec's "
                "own search obeys it"
            )
        asked = constraint.sharding_types
        if not asked:
            continue
        can = [*FUSED_TYPES, *STOCK]
        if set(can).isdisjoint(asked):
            raise ValueError(
                f"constraints of table {name!r} ask for {asked}, which the cost model has no price "
                f"for; it knows {can}.  Without cluster, TorchRec's estimators decide"
            )
        given = search.tables.get(name)
        both = [t for t in asked if t in can and (given is None or t in given)]
        if not both:
            raise ValueError(
                f"constraints of table {name!r} ask for {asked}, search.tables for {given}: they "
                "have nothing in common"
            )
        tables[name] = both
    return replace(search, tables=tables)
