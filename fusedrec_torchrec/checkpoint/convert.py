"""Converts a checkpoint to what another sharding or number of ranks would have written.

``load_checkpoint`` needs no conversion.  This is for whoever loads with
torch.distributed.checkpoint alone, as a stock TorchRec training does: names and shapes of optimizer
states are then those that the other sharding has, and each rank finds its shards in its own files.

Pieces are read when they are written, some megabytes at a time.
"""

import io
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.checkpoint.contents import Contents, StoredTable
from fusedrec_torchrec.checkpoint.file_names import MANIFEST, METADATA_FILE
from fusedrec_torchrec.checkpoint.manifest import Manifest, TableEntry
from fusedrec_torchrec.checkpoint.save import PLAN_FILE
from fusedrec_torchrec.checkpoint.table_state import COUNTS, parse_state
from fusedrec_torchrec.checkpoint.writer import CheckedWriter
from fusedrec_torchrec.compat.distributed_checkpoint import StoragePrefix
from fusedrec_torchrec.core.folder_files import open_in_folder
from fusedrec_torchrec.core.json_file import read_json
from fusedrec_torchrec.planner.cost.table_load import even_ranges
from fusedrec_torchrec.sharding.plan_file import PlanFile, shards_of, table_plan_of, write_plan
from fusedrec_torchrec.sharding.sharding_type import (
    FUSED_COLUMN_WISE,
    FUSED_TABLE_WISE,
    SHARDINGS,
)

__all__ = ["convert", "plan_for"]

DATA_PARALLEL = "data_parallel"
PIECE = 32 << 20  # bytes that are read at once
FILE = 256 << 20  # bytes of a file
Shard = tuple[int, tuple[int, ...], tuple[int, ...]]  # rank, offsets, sizes


def plan_for(
    contents: Contents, world_size: int, sharding: str, tables: Mapping[str, str] | None = None
) -> PlanFile:
    """Makes a plan for all tables of a checkpoint.

    Args:
        contents: what the checkpoint holds.
        world_size: number of ranks.
        sharding: that of all tables that are not in ``tables``.
        tables: shardings of single tables.

    Raises:
        ValueError: an unknown sharding or table, or columns that cannot be divided.
    """
    given = dict(tables or {})
    for name in given:
        if name not in contents.tables:
            raise ValueError(
                f"{name!r} is no table of {contents.path}; there are "
                f"{', '.join(sorted(contents.tables))}"
            )
    for kind in (sharding, *given.values()):
        if kind not in SHARDINGS:
            raise ValueError(f"sharding is {kind!r}, must be one of {SHARDINGS}")
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}, must be at least 1")
    load = [0] * world_size
    plans = {}
    for name, table in sorted(contents.tables.items(), key=lambda item: -item[1].bytes):
        kind = given.get(name, sharding)
        if kind == DATA_PARALLEL:
            plans[name] = table_plan_of(kind, table.rows, table.columns, [])
            plans[name] = replace(plans[name], ranks=None, rows_per_rank=None, kernel="dense")
            continue
        shards = _shards(table, kind, load)
        for rank, _, sizes in shards:
            load[rank] += sizes[0] * sizes[1] * table.dtype.itemsize
        plans[name] = table_plan_of(kind, table.rows, table.columns, shards)
    ordered = {name: plans[name] for name in contents.tables}
    return PlanFile(ranks=world_size, ranks_per_node=world_size, tables=ordered)


def _shards(table: StoredTable, sharding: str, load: Sequence[int]) -> list[Shard]:
    ranks, rows, columns = len(load), table.rows, table.columns
    if sharding in ("table_wise", FUSED_TABLE_WISE):
        return [(min(range(ranks), key=lambda r: (load[r], r)), (0, 0), (rows, columns))]
    if sharding in ("column_wise", FUSED_COLUMN_WISE):
        # FBGEMM wants shards of a multiple of four columns.
        count = max(n for n in range(1, ranks + 1) if n == 1 or columns % (4 * n) == 0)
        width = columns // count
        return [(r, (0, r * width), (rows, width)) for r in range(count)]
    starts = even_ranges(rows, ranks).tolist()
    return [(r, (starts[r], 0), (starts[r + 1] - starts[r], columns)) for r in range(ranks)]


@dataclass(frozen=True)
class _Piece:
    """A piece of a tensor of the new checkpoint, and how to read it from the old one."""

    name: str
    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[torch.Tensor], None]

    @property
    def bytes(self) -> int:
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


def convert(
    contents: Contents,
    target: Path,
    plan: PlanFile,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Writes a checkpoint anew; the folder appears when it is whole.

    Args:
        contents: of the checkpoint to read.
        target: folder to write, which must not exist.
        plan: how its tables are to be sharded.
        progress: is told of bytes that were written.

    Raises:
        ValueError: the target exists, or the plan is not for these tables.
    """
    if target.exists():
        raise ValueError(f"{target} exists already")
    if set(plan.tables) != set(contents.tables):
        missing = sorted(set(contents.tables) ^ set(plan.tables))
        raise ValueError(
            f"plan and {contents.path} have different tables: {missing[0]!r} is in one only"
        )
    if plan.grid is not None:
        raise ValueError("the plan is for groups of ranks; convert to the plan of one group")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _Conversion(contents, plan).write(partial, progress or (lambda _: None))
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class _Conversion:
    """Decides which rank writes which piece, and writes them."""

    def __init__(self, contents: Contents, plan: PlanFile) -> None:
        self._contents, self._reader, self._plan = contents, contents.reader, plan
        self._pieces: list[_Piece] = []
        self._about: dict[str, TensorStorageMetadata] = {}
        self._paths: dict[str, Any] = dict(self._reader.metadata.planner_data or {})
        self._load = [0] * plan.ranks
        self._reader.check_sizes()  # so that what is allocated for a piece is in the files
        for table in contents.tables.values():
            self._table(table)
        for name in contents.others:
            self._replicated(name, self._reader.tensors[name].size)

    # ------------------------------------------------------------ what goes where

    def _table(self, table: StoredTable) -> None:
        plan = self._plan.tables[table.name]
        if plan.rows and (plan.rows, plan.columns) != (table.rows, table.columns):
            raise ValueError(
                f"the plan has table {table.name!r} with {plan.rows} x {plan.columns}, the "
                f"checkpoint with {table.rows} x {table.columns}"
            )
        shards = shards_of(table.name, plan, table.rows, table.columns, self._plan.ranks)
        if shards is None:
            shards = [(self._emptiest(), (0, 0), (table.rows, table.columns))]
        whole = torch.Size((table.rows, table.columns))
        self._boxes(table.weight, table.weight, whole, table.dtype, shards)
        replicated = plan.sharding == DATA_PARALLEL
        adam = any(kind in ("exp_avg_sq", "momentum2") for kind in table.states)
        for kind, name in table.states.items():
            stored = self._contents.state(table, kind)
            if kind in COUNTS or stored.is_single:
                # As it is: who has no use for it does not look for it.
                self._replicated(name, stored.size)
            else:
                self._state(table, kind, shards, _state_name(kind, replicated, adam), replicated)
        if replicated and table.states and not set(table.states) & set(COUNTS):
            self._steps(table)

    def _state(
        self, table: StoredTable, kind: str, shards: Sequence[Shard], name: str, replicated: bool
    ) -> None:
        old = table.states[kind]
        parsed = parse_state(old)
        assert parsed is not None
        last = name if replicated else f"{table.name}.{name}"
        new = f"{parsed.path}{parsed.weight}.{last}"
        self._rename(old, new, last)
        stored = self._contents.state(table, kind)
        dtype = self._reader.tensors[old].properties.dtype
        if stored.by_element:
            whole = torch.Size((table.rows, table.columns))
            self._boxes(old, new, whole, dtype, shards)
            return
        columns = sorted({offsets[1] for _, offsets, sizes in shards if sizes[0]})
        several = len(columns) > 1
        size = torch.Size((table.rows * len(columns) if several else table.rows,))
        for rank, offsets, sizes in shards:
            first = columns.index(offsets[1]) * table.rows + offsets[0] if several else offsets[0]
            self._rows(new, rank, first, sizes[0], offsets[0], dtype, stored, replicated)
        self._about[new] = _about((*size, 1) if replicated else size, dtype)

    def _rows(
        self,
        name: str,
        rank: int,
        at: int,
        count: int,
        first_row: int,
        dtype: torch.dtype,
        stored: Any,
        replicated: bool,
    ) -> None:
        """Adds pieces of a state with one number for each row, some rows at a time."""
        step = max(PIECE // dtype.itemsize, 1)
        for begin in range(0, count, step):
            rows = min(step, count - begin)

            def read(into: torch.Tensor, first: int = first_row + begin) -> None:
                stored.rows(first, into.view(-1))

            offsets, sizes = (at + begin,), (rows,)
            if replicated:
                offsets, sizes = (at + begin, 0), (rows, 1)  # type: ignore[assignment]
            self._add(_Piece(name, rank, offsets, sizes, dtype, read))

    def _steps(self, table: StoredTable) -> None:
        """Adds the number of steps, which torch's optimizers count."""
        parsed = parse_state(next(iter(table.states.values())))
        assert parsed is not None
        manifest = self._contents.manifest
        steps = 0.0 if manifest is None or manifest.step is None else float(manifest.step)
        new = f"{parsed.path}{parsed.weight}.step"
        for other in ("sum", "exp_avg"):
            if (path := self._paths.get(f"{parsed.path}{parsed.weight}.{other}")) is not None:
                self._paths[new] = (*path[:-1], "step")

        def read(into: torch.Tensor) -> None:
            into.fill_(steps)

        self._about[new] = _about((), torch.float32)
        self._add(_Piece(new, self._emptiest(), (), (), torch.float32, read))

    def _boxes(
        self, old: str, new: str, size: torch.Size, dtype: torch.dtype, shards: Sequence[Shard]
    ) -> None:
        """Adds pieces of the shards of a tensor of two dimensions, some rows at a time."""
        self._about[new] = _about(size, dtype)
        for rank, offsets, sizes in shards:
            step = max(PIECE // max(sizes[1] * dtype.itemsize, 1), 1)
            for begin in range(0, sizes[0], step):
                at = (offsets[0] + begin, offsets[1])

                def read(into: torch.Tensor, at: tuple[int, ...] = at) -> None:
                    self._reader.read(old, at, into)

                rows = min(step, sizes[0] - begin)
                self._add(_Piece(new, rank, at, (rows, sizes[1]), dtype, read))

    def _replicated(self, name: str, size: torch.Size) -> None:
        """Adds a tensor that all ranks have, which one of them writes."""
        dtype = self._reader.tensors[name].properties.dtype
        self._about[name] = _about(size, dtype)
        at = (0,) * len(size)

        def read(into: torch.Tensor) -> None:
            self._reader.read(name, at, into)

        self._add(_Piece(name, self._emptiest(), at, tuple(size), dtype, read))

    def _add(self, piece: _Piece) -> None:
        self._pieces.append(piece)
        self._load[piece.rank] += piece.bytes

    def _emptiest(self) -> int:
        return min(range(self._plan.ranks), key=lambda rank: (self._load[rank], rank))

    def _rename(self, old: str, new: str, last: str) -> None:
        """Renames a state in what tells nested names from flat ones."""
        path = self._paths.pop(old, None)
        if path is not None:
            self._paths[new] = (*path[:-1], last)

    # ------------------------------------------------------------ writing

    def write(self, folder: Path, progress: Callable[[int], None]) -> None:
        """Writes the checkpoint into a folder."""
        manifest = self._manifest(folder)
        written_anew = {MANIFEST, METADATA_FILE, *(path.name for path in folder.iterdir())}
        for path in self._contents.path.iterdir():
            is_data = path.suffix == ".distcp" or path.name.startswith("plan.")
            if path.is_file() and not is_data and path.name not in written_anew:
                _copy(path, folder / path.name)
        _update_run_state(folder, self._plan.ranks)
        writer = CheckedWriter(folder, manifest)
        writer.set_up_storage_writer(is_coordinator=True)
        results: list[list[WriteResult]] = []
        for rank in range(self._plan.ranks):
            for number, pieces in enumerate(self._files(rank)):
                results.append(_write(writer, f"__{rank}_{number}_", pieces, {}))
                progress(sum(piece.bytes for piece in pieces))
        objects = {name: self._reader.content(name) for name in self._reader.objects}
        if objects:
            results.append(_write(writer, "__objects_", [], objects))
        stored: dict[str, Any] = dict(self._about)
        for piece in self._pieces:
            chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
            stored[piece.name].chunks.append(chunk)
        stored.update({name: BytesStorageMetadata() for name in objects})
        writer.finish(Metadata(stored, planner_data=self._paths), results)

    def _files(self, rank: int) -> list[list[_Piece]]:
        """Returns the pieces of a rank, in files that are not too large."""
        mine = [piece for piece in self._pieces if piece.rank == rank]
        ends = accumulate(piece.bytes for piece in mine)
        files: dict[int, list[_Piece]] = {}
        for piece, end in zip(mine, ends, strict=True):
            files.setdefault((end - piece.bytes) // FILE, []).append(piece)
        return list(files.values())

    def _manifest(self, folder: Path) -> Manifest:
        contents, old = self._contents, self._contents.manifest
        tables = {}
        for name, table in contents.tables.items():
            entry = contents.entry(table)
            if entry is None:
                dtype = str(table.dtype).removeprefix("torch.")
                entry = TableEntry(
                    table.weight, table.rows, table.columns, dtype, hashing_is_known=False
                )
            tables[name] = replace(entry, sharding=self._plan.tables[name].sharding)
        hot_file = None
        if old is not None and old.hot_rows is not None:
            hot_file = old.hot_rows
            with open_in_folder(contents.path, hot_file) as file:
                HotSet.read(file, contents.path / hot_file).save(folder / hot_file)
        write_plan(folder / PLAN_FILE, self._plan)
        return Manifest(
            tables=tables,
            step=None if old is None else old.step,
            world_size=self._plan.ranks,
            plan=PLAN_FILE,
            hot_rows=hot_file,
        )


def _update_run_state(folder: Path, ranks: int) -> None:
    """Corrects the number of ranks in the file that a run puts into its checkpoints."""
    path = folder / "run.json"
    if path.is_file():
        state = read_json(folder, path.name)
        if not isinstance(state, dict):
            raise ValueError(f"{path} is damaged: it holds no state of a run")
        path.write_text(json.dumps({**state, "world_size": ranks}))


def _copy(source: Path, target: Path) -> None:
    """Copies a file of the checkpoint, and nothing that a link in it leads to."""
    with open_in_folder(source.parent, source.name) as file, target.open("wb") as copied:
        shutil.copyfileobj(file, copied)
        about = os.fstat(file.fileno())
    os.utime(target, ns=(about.st_atime_ns, about.st_mtime_ns))


def _about(size: Sequence[int], dtype: torch.dtype) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), [])


def _state_name(kind: str, replicated: bool, adam: bool) -> str:
    """Returns what a state is called by fused optimizers, or by torch's."""
    if kind in ("exp_avg_sq", "momentum2"):
        return "exp_avg_sq"
    if replicated and kind != "momentum1":
        return kind
    if kind in ("momentum1", "sum", "exp_avg"):
        return ("exp_avg" if adam else "sum") if replicated else "momentum1"
    return kind


def _write(
    writer: CheckedWriter, prefix: str, pieces: Sequence[_Piece], objects: Mapping[str, bytes]
) -> list[WriteResult]:
    items = [
        WriteItem(
            index=MetadataIndex(piece.name, piece.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)),
                TensorProperties(dtype=piece.dtype),
                torch.Size(piece.sizes),
            ),
        )
        for piece in pieces
    ]
    items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in objects]
    planner = _Pieces(pieces, objects)
    plan = SavePlan(items, storage_data=StoragePrefix(prefix))
    return writer.write_data(plan, planner).value()


class _Pieces(SavePlanner):
    """Reads a piece when it is to be written."""

    def __init__(self, pieces: Sequence[_Piece], objects: Mapping[str, bytes]) -> None:
        self._pieces = {MetadataIndex(piece.name, piece.offsets): piece for piece in pieces}
        self._objects = objects

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._objects[write_item.index.fqn])
        piece = self._pieces[write_item.index]
        result = torch.empty(piece.sizes, dtype=piece.dtype)
        piece.read(result)
        return result

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    def create_local_plan(self) -> SavePlan:
        raise NotImplementedError

    def create_global_plan(self, all_plans: Any) -> Any:
        raise NotImplementedError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        raise NotImplementedError
