"""TorchRec's printed planner statistics, where they know its own sharding types only."""

from collections.abc import Iterator
from contextlib import contextmanager

from torchrec.distributed.planner import stats

__all__ = ["abbreviated"]


@contextmanager
def abbreviated(sharding_type: str, abbreviation: str) -> Iterator[None]:
    """Makes TorchRec abbreviate one more sharding type while this is open.

    HACK: a module function of TorchRec does it, and raises for types of others.  It can go when
    TorchRec falls back to the type's own name there.
    """
    original = stats._get_sharding_type_abbr
    stats._get_sharding_type_abbr = lambda name: (
        abbreviation if name == sharding_type else original(name)
    )
    try:
        yield
    finally:
        stats._get_sharding_type_abbr = original
