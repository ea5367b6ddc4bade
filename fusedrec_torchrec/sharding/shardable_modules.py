"""The modules of a model that sharders can shard."""

from collections.abc import Iterator, Sequence

from torch import nn
from torchrec.distributed.types import ModuleSharder

__all__ = ["shardable_modules"]


def shardable_modules(
    model: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]
) -> Iterator[tuple[str, nn.Module, ModuleSharder[nn.Module]]]:
    """Yields modules that have a sharder, with their paths; not those within one."""
    by_type = {sharder.module_type: sharder for sharder in sharders}
    within: list[str] = []
    for path, module in model.named_modules():
        sharder = by_type.get(type(module))
        if sharder is not None and not any(_is_below(path, other) for other in within):
            within.append(path)
            yield path, module, sharder


def _is_below(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))
