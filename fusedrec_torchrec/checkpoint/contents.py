"""Lists the tables of a checkpoint with their optimizer states, and what else it has."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from fusedrec_torchrec.checkpoint.load import WEIGHTS
from fusedrec_torchrec.checkpoint.manifest import Manifest, TableEntry, read_manifest
from fusedrec_torchrec.checkpoint.reader import CheckpointReader
from fusedrec_torchrec.checkpoint.table_state import WEIGHT, StateNames, StoredState

__all__ = ["Contents", "StoredTable"]


@dataclass(frozen=True)
class StoredTable:
    """A table in a checkpoint.

    Attributes:
        name: of the table.
        weight: name of its weight.
        rows: of the table.
        columns: of the table.
        dtype: of the weight.
        shards: that the weight is stored in.
        states: names of its optimizer states, by what they are.
    """

    name: str
    weight: str
    rows: int
    columns: int
    dtype: torch.dtype
    shards: int
    states: dict[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of the weight."""
        return self.rows * self.columns * self.dtype.itemsize


class Contents:
    """What a checkpoint holds, according to its metadata and its manifest, if it has one.

    Args:
        path: folder of the checkpoint.

    Raises:
        ValueError: there is no checkpoint, or it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = CheckpointReader(path)
        self.manifest: Manifest | None = read_manifest(path)

    @cached_property
    def tables(self) -> dict[str, StoredTable]:
        """The tables by name; those that several modules have under one name, by path."""
        tensors = self.reader.tensors
        names = StateNames(tensors, WEIGHTS)
        by_name: dict[str, list[StoredTable]] = {}
        for name, about in tensors.items():
            parsed = WEIGHT.fullmatch(name)
            if parsed is None or not name.startswith(f"{WEIGHTS}.") or len(about.size) != 2:
                continue
            if self.manifest is not None and self.manifest.of_weight(name) is None:
                continue  # of a module that was not sharded
            table = StoredTable(
                name=parsed["table"],
                weight=name,
                rows=about.size[0],
                columns=about.size[1],
                dtype=about.properties.dtype,
                shards=sum(1 for chunk in about.chunks if chunk.sizes.numel()),
                states=names.of_weight(name.removeprefix(f"{WEIGHTS}.")),
            )
            by_name.setdefault(table.name, []).append(table)
        unique: dict[str, StoredTable] = {}
        for name, tables in by_name.items():
            for table in tables:  # of several modules: told apart by their paths
                path = table.weight.removeprefix(f"{WEIGHTS}.").removesuffix(".weight")
                shown = name if len(tables) == 1 else path
                unique[shown] = replace(table, name=shown)
        return unique

    @cached_property
    def others(self) -> list[str]:
        """Names of tensors that are not of tables."""
        of_tables = {
            name
            for table in self.tables.values()
            for name in (table.weight, *table.states.values())
        }
        return [name for name in self.reader.tensors if name not in of_tables]

    def state(self, table: StoredTable, kind: str) -> StoredState:
        """Returns one of a table's optimizer states."""
        return StoredState(self.reader, table.states[kind], table.rows, table.columns, table.weight)

    def entry(self, table: StoredTable) -> TableEntry | None:
        """Returns what the manifest says of a table; None if it says nothing."""
        return None if self.manifest is None else self.manifest.of_weight(table.weight)

    def sharding(self, table: StoredTable) -> str:
        """Returns the sharding of a table, as the manifest has it or as its shards look."""
        entry = self.entry(table)
        if entry is not None and entry.sharding is not None:
            return entry.sharding
        chunks = [c for c in self.reader.tensors[table.weight].chunks if c.sizes.numel()]
        if any("sum" in kind or kind in ("exp_avg", "step") for kind in table.states):
            return "data_parallel"
        if len(chunks) <= 1:
            return "whole"
        if all(c.sizes[1] == table.columns for c in chunks):
            return "rows"
        return "columns" if all(c.sizes[0] == table.rows for c in chunks) else "rows and columns"
