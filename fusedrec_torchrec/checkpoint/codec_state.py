"""What codecs keep from step to step: thresholds, and residuals of gradients.

It is different on every rank, and belongs to a training, not to its model: it is saved beside
weights and optimizer state, where nobody who does not ask for it sees it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fusedrec_torchrec.codecs.dct import DctCodec
from fusedrec_torchrec.codecs.dense_gradients import thresholds_of
from fusedrec_torchrec.sharding.modules.fused_tables import FusedTables, fused_tables_of

__all__ = ["codec_state", "has_codec_state", "load_codec_state"]

State = dict[str, torch.Tensor]


def codec_state(model: nn.Module) -> State:
    """Returns what this rank's codecs keep, by name; empty if none of them keeps anything."""
    tensors: State = {}
    dense = thresholds_of(model)
    if dense is not None:
        tensors |= {f"dense.{name}": value for name, value in dense.state().items()}
    for path, fused in fused_tables_of(model):
        for table, codec in _dct_codecs(fused):
            tensors[f"rows.{path}.{table}"] = codec.threshold.state()
        for rows in fused.replications:
            tensors |= {f"{rows.name}.{path}.{key}": value for key, value in rows.state().items()}
    return tensors


def has_codec_state(model: nn.Module) -> bool:
    """Tells whether a codec of the model keeps anything from step to step."""
    return thresholds_of(model) is not None or any(
        _dct_codecs(fused) or any(rows.state() for rows in fused.replications)
        for _, fused in fused_tables_of(model)
    )


def load_codec_state(
    model: nn.Module, states: Sequence[Mapping[str, torch.Tensor]], own: bool
) -> None:
    """Takes over what codecs kept when a checkpoint was saved.

    Args:
        model: the sharded model.
        states: that of this rank, or those of all ranks of a training with another number of
            ranks, which share what those had.  Empty, to begin anew.
        own: whether the state is that of this rank.
    """
    dense = thresholds_of(model)
    if dense is not None:
        dense.load([_below(state, "dense.") for state in states])
    for path, fused in fused_tables_of(model):
        for table, codec in _dct_codecs(fused):
            name = f"rows.{path}.{table}"
            codec.threshold.load([state[name] for state in states if name in state])
        for rows in fused.replications:
            rows.load([_below(state, f"{rows.name}.{path}.") for state in states], own)


def _below(state: Mapping[str, torch.Tensor], prefix: str) -> State:
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def _dct_codecs(fused: FusedTables) -> list[tuple[str, DctCodec]]:
    """Returns the codecs that have a threshold, with the first table of their bucket."""
    if fused.wires is None:
        return []
    return [
        (fused.tables.tables[bucket.first_table].name, codec)
        for bucket, codec in zip(fused.tables.buckets, fused.wires[0].codecs, strict=True)
        if isinstance(codec, DctCodec)
    ]
