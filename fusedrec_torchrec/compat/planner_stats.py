"""TorchRec's printed planner statistics, where they know its own sharding types only."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torchrec.distributed.planner import stats

__all__ = ["abbreviated"]


@contextmanager
def abbreviated(abbreviations: Mapping[str, str]) -> Iterator[None]:
    """Makes TorchRec abbreviate more sharding types while this is open.

    HACK: a module function of TorchRec does it, and raises for types of others.  It can go when
    TorchRec falls back to the type's own name there.
    """
    original = stats._get_sharding_type_abbr
    stats._get_sharding_type_abbr = lambda name: abbreviations.get(name) or original(name)
    try:
        yield
    finally:
        stats._get_sharding_type_abbr = original
