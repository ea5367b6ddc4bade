"""What compression keeps from step to step: thresholds, and what is left of gradients.

It is different on every rank, and belongs to a training, not to its model: it is saved beside
weights and optimizer state, where nobody who does not ask for it sees it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fusedrec_torchrec.codecs.dct import DctCodec
from fusedrec_torchrec.codecs.dense_gradients import thresholds_of
from fusedrec_torchrec.sharding.modules.fused_part import FusedPart, fused_parts

__all__ = ["compression_state", "is_compressed", "load_compression_state"]

State = dict[str, torch.Tensor]


def compression_state(model: nn.Module) -> State:
    """Of this rank, by name; empty if nothing is compressed that has a state."""
    found: State = {}
    dense = thresholds_of(model)
    if dense is not None:
        found |= {f"dense.{name}": value for name, value in dense.state().items()}
    for path, part in fused_parts(model):
        for table, codec in _largest(part):
            found[f"rows.{path}.{table}"] = codec.threshold.state()
        for name, each in part.synced_gradients():
            found |= {f"{name}.{path}.{key}": value for key, value in each.state().items()}
    return found


def is_compressed(model: nn.Module) -> bool:
    """Whether anything is compressed that has a state."""
    return thresholds_of(model) is not None or any(
        _largest(part) or any(each.state() for _, each in part.synced_gradients())
        for _, part in fused_parts(model)
    )


def load_compression_state(
    model: nn.Module, states: Sequence[Mapping[str, torch.Tensor]], own: bool
) -> None:
    """Goes on where the ranks of a training were.

    Args:
        model: sharded.
        states: of this rank, or of all ranks of a training with another number of them, who share
            what those had.  Empty, to begin anew.
        own: whether it is of this rank.
    """
    dense = thresholds_of(model)
    if dense is not None:
        dense.load([_below(state, "dense.") for state in states])
    for path, part in fused_parts(model):
        for table, codec in _largest(part):
            name = f"rows.{path}.{table}"
            codec.threshold.load([state[name] for state in states if name in state])
        for name, each in part.synced_gradients():
            each.load([_below(state, f"{name}.{path}.") for state in states], own)


def _below(state: Mapping[str, torch.Tensor], prefix: str) -> State:
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def _largest(part: FusedPart) -> list[tuple[str, DctCodec]]:
    """Codecs with a threshold, by the first table of their bucket."""
    if part.wires is None:
        return []
    return [
        (part.layout.tables[bucket.first_table].name, codec)
        for bucket, codec in zip(part.layout.buckets, part.wires[0].codecs, strict=True)
        if isinstance(codec, DctCodec)
    ]
