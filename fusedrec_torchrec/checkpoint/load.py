"""Loads a checkpoint into a model of whatever sharding, on whatever number of ranks.

Each rank reads its own shards.  An optimizer state that has another name or shape in the
checkpoint is converted, and the report says so.  What goes wrong on one rank is raised on all.
"""

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from fusedrec_torchrec.checkpoint.codec_state import has_codec_state, load_codec_state
from fusedrec_torchrec.checkpoint.local_shards import local_shards
from fusedrec_torchrec.checkpoint.manifest import check_hashing, read_manifest
from fusedrec_torchrec.checkpoint.reader import CheckpointReader
from fusedrec_torchrec.checkpoint.table_state import (
    COUNTS,
    StateName,
    StateNames,
    StoredState,
    number_of_states,
    parse_state,
)
from fusedrec_torchrec.checkpoint.verify import verify_on_all_ranks
from fusedrec_torchrec.compat.distributed_checkpoint import (
    OBJ_PATH,
    flatten_state_dict,
    set_element,
)
from fusedrec_torchrec.core.all_ranks import raise_on_all_ranks

__all__ = ["CODEC_STATE", "OPTIMIZER", "WEIGHTS", "LoadReport", "load_checkpoint"]

log = logging.getLogger(__name__)
WEIGHTS = "model"
OPTIMIZER = "optimizer"
CODEC_STATE = "compression"  # the name in checkpoints
RANK = re.compile("[0-9]{1,7}")


@dataclass
class LoadReport:
    """What a load did beside copying.

    Attributes:
        converted: optimizer states that have another name or shape in the checkpoint.
        kept: what the model has and the checkpoint does not need to have, and was left as it is.
    """

    converted: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    verify: bool = True,
    leave: str | None = None,
) -> LoadReport:
    """Loads weights and optimizer state; must be called on all ranks.

    The checkpoint may be one of ``save_checkpoint`` or one that torch.distributed.checkpoint has
    written of ``{"model": model.state_dict(), "optimizer": optimizer.state_dict()}``.

    Args:
        path: folder of the checkpoint.
        model: to load into.
        optimizer: to load into, and with it what codecs keep from step to step; None loads weights
            only.
        verify: whether to compare checksums before anything is loaded.
        leave: what the names begin with that are not loaded.

    Raises:
        ValueError: the checkpoint is damaged, or of other tables, or its ids are hashed in another
            way than the model's; on all ranks.
    """
    path = Path(path)
    if verify:
        verify_on_all_ranks(path)
    state: dict[str, Any] = {WEIGHTS: model.state_dict()}
    if optimizer is not None:
        state[OPTIMIZER] = optimizer.state_dict()
    report = LoadReport()
    reader = CheckpointReader(path)
    reads: list[Callable[[], None]] = []
    codec_states: list[dict[str, torch.Tensor]] = []
    is_own = False

    def check() -> None:
        check_hashing(read_manifest(path), model, state[WEIGHTS], path, WEIGHTS)
        reads.extend(_Load(reader, report, leave).plan_reads(state))

    def read() -> None:
        nonlocal codec_states, is_own
        for read_tensor in reads:
            read_tensor()
        if optimizer is not None:
            codec_states, is_own = _read_codec_states(reader, model)

    # All ranks must find that it fits before one of them changes a number.
    for phase in (check, read):
        raise_on_all_ranks(_problem_of(phase))
    model.load_state_dict(state[WEIGHTS])
    if optimizer is not None:
        optimizer.load_state_dict(state[OPTIMIZER])
        load_codec_state(model, codec_states, is_own)
    for line in report.converted:
        log.info("%s: %s", path, line)
    return report


def _read_codec_states(
    reader: CheckpointReader, model: nn.Module
) -> tuple[list[dict[str, torch.Tensor]], bool]:
    """Returns what codecs kept, as ``load_codec_state`` takes it: states, and whether it is ours.

    If as many ranks wrote the checkpoint as there are now, each rank reads its own state, otherwise
    those of all.
    """
    stored = _CodecStates(reader)
    is_own = stored.ranks == list(range(dist.get_world_size()))
    if has_codec_state(model):
        wanted = [dist.get_rank()] if is_own else stored.ranks
        return [stored.read(rank) for rank in wanted], is_own
    if stored.ranks:
        log.warning("%s: what compression had left of gradients is not used here", reader.path)
    return [], is_own


class _CodecStates:
    """What codecs kept on each of the ranks that wrote the checkpoint."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._names: dict[int, dict[str, str]] = {}
        for name in reader.tensors:
            prefix, _, rest = name.partition(".")
            if prefix == CODEC_STATE:
                rank, _, key = rest.partition(".")
                if not RANK.fullmatch(rank):
                    raise ValueError(f"{reader.path}: {name!r} is not of a rank")
                self._names.setdefault(int(rank), {})[key] = name
        self.ranks = sorted(self._names)

    def read(self, rank: int) -> dict[str, torch.Tensor]:
        """Returns the state of one rank, by name."""
        return {key: self._reader.whole(name) for key, name in self._names[rank].items()}


def _problem_of(function: Callable[[], None]) -> str | None:
    """Returns the text of whatever a function raises, for all ranks to hear of; None if nothing."""
    try:
        function()
    except ValueError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class _Load:
    """Decides how each tensor of a state dict is read from the checkpoint."""

    def __init__(self, reader: CheckpointReader, report: LoadReport, leave: str | None) -> None:
        self._reader, self._report, self._leave = reader, report, leave
        self._stored = StateNames(reader.tensors, WEIGHTS)
        self._objects = set(reader.objects)

    def plan_reads(self, state: dict[str, Any]) -> Iterator[Callable[[], None]]:
        """Yields functions that read all tensors in place, and other data if it is there.

        Raises:
            ValueError: something does not fit; nothing has been read by then.
        """
        flat, paths = flatten_state_dict(state)
        here = StateNames(flat, WEIGHTS)
        for name, value in flat.items():
            if self._leave is not None and name.startswith(self._leave):
                continue
            if not isinstance(value, torch.Tensor):
                if name in self._objects:  # settings of optimizers are as they were
                    yield partial(self._plain, state, name, paths[name])
                continue
            parsed = None if name.startswith(f"{WEIGHTS}.") else parse_state(name)
            weight = None if parsed is None else here.weight_of(parsed)
            if parsed is None or weight is None:
                yield self._same(name, value)
            else:
                table = flat[f"{WEIGHTS}.{weight}"].size()
                yield self._state(parsed, value, weight, here, table)

    def _plain(self, state: dict[str, Any], name: str, path: OBJ_PATH) -> None:
        set_element(state, path, self._reader.object(name))

    def _same(self, name: str, value: torch.Tensor) -> Callable[[], None]:
        """Returns what reads a tensor of the same name and shape."""
        about = self._reader.tensors.get(name)
        if about is None:
            raise ValueError(
                f"{self._reader.path} has no {name!r}, which the model has: it is a checkpoint of "
                "another model or optimizer"
            )
        if tuple(about.size) != tuple(value.size()):
            raise ValueError(
                f"{self._reader.path}: {name!r} has shape {tuple(about.size)}, the model's has "
                f"{tuple(value.size())}"
            )
        # TorchRec's DTensors of fp16 tables call themselves float32: shards know better.
        for _, shard in local_shards(value):
            if about.properties.dtype != shard.dtype:
                raise ValueError(
                    f"{self._reader.path}: {name!r} is {about.properties.dtype}, the model's is "
                    f"{shard.dtype}"
                )
        return partial(self._read, name, value)

    def _read(self, name: str, value: torch.Tensor) -> None:
        for offsets, shard in local_shards(value):
            if shard.device.type == "cpu" and shard.is_contiguous():
                self._reader.read(name, offsets, shard.detach())
            else:
                on_host = torch.empty(shard.shape, dtype=shard.dtype)
                self._reader.read(name, offsets, on_host)
                shard.detach().copy_(on_host)

    def _state(
        self,
        wanted: StateName,
        value: torch.Tensor,
        weight: str,
        here: StateNames,
        table: torch.Size,
    ) -> Callable[[], None]:
        """Returns what reads an optimizer state of a table, and converts it if it has to be."""
        name = self._stored.find(weight, wanted)
        if name is None and wanted.state in COUNTS:
            # Fused optimizers on the CPU do not count steps; nor does anybody need it there.
            self._report.kept.append(wanted.name)
            return _nothing
        ours, theirs = (number_of_states(names.of_weight(weight)) for names in (here, self._stored))
        if name is None or ours != theirs:
            has = ", ".join(self._stored.of_weight(weight)) or "none"
            raise ValueError(
                f"{self._reader.path}: the optimizer of table {wanted.table!r} wants the state "
                f"{wanted.state!r} among {ours}, the checkpoint has {has}: it was trained with "
                "another optimizer"
            )
        size = tuple(value.size())
        if name == wanted.name and tuple(self._reader.tensors[name].size) == size:
            return self._same(name, value)
        rows, columns = table
        stored = StoredState(self._reader, name, rows, columns, f"{WEIGHTS}.{weight}")
        was = self._reader.tensors[name].properties.dtype
        rounded = "" if was == value.dtype else f", rounded from {was} to {value.dtype}"
        self._report.converted.append(
            f"{name} {list(stored.size)} is loaded as {wanted.name} {list(size)}{rounded}"
        )
        if wanted.state in COUNTS or stored.is_single:
            return partial(self._fill, stored, value)
        if stored.by_element:
            if size != tuple(stored.size):
                raise self._mismatch(wanted, stored, size)
            return partial(self._read, name, value)
        if size[1:] not in ((), (1,)) or (rows and size[0] % rows):
            raise self._mismatch(wanted, stored, size)
        for offsets, shard in local_shards(value):
            if shard.numel() and offsets[0] % rows + shard.size(0) > rows:
                raise self._mismatch(wanted, stored, size)
        return partial(self._by_row, stored, value, rows)

    def _fill(self, stored: StoredState, value: torch.Tensor) -> None:
        for _, shard in local_shards(value):
            shard.detach().fill_(stored.count())

    def _by_row(self, stored: StoredState, value: torch.Tensor, rows: int) -> None:
        for offsets, shard in local_shards(value):
            if shard.numel():
                numbers = torch.empty(shard.numel(), dtype=shard.dtype)
                stored.rows(offsets[0] % rows, numbers)
                shard.detach().copy_(numbers.view(shard.shape))

    def _mismatch(
        self, wanted: StateName, stored: StoredState, size: tuple[int, ...]
    ) -> ValueError:
        return ValueError(
            f"{self._reader.path}: {stored.name!r} has shape {tuple(stored.size)}, the optimizer "
            f"of table {wanted.table!r} here wants {size}: it was trained with another optimizer"
        )


def _nothing() -> None:
    pass
