"""The manifest of a checkpoint, which people and programs can read: ``manifest.json``.

It says what the checkpoint holds.

Beside names and sizes it has what the weights mean nothing without: how ids are hashed into rows.
It also has the buckets, the hot rows and the plan of the training that wrote it, and a checksum of
every file.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
from pydantic import AfterValidator, Field
from torch import nn

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.checkpoint.file_names import MANIFEST
from fusedrec_torchrec.core.config import NO_OTHER_KEYS, from_mapping
from fusedrec_torchrec.core.files import write_json
from fusedrec_torchrec.core.folder_files import check_file_name, shown
from fusedrec_torchrec.core.json_file import read_json
from fusedrec_torchrec.exchange.hashing import table_salt
from fusedrec_torchrec.sharding.modules.fused_tables import fused_tables_of

__all__ = [
    "Manifest",
    "TableEntry",
    "check_hashing",
    "describe",
    "hot_set_of",
    "read_manifest",
]

FORMAT = "fusedrec_torchrec checkpoint"
VERSION = 1
PACKAGES = ("fusedrec_torchrec", "torch", "torchrec")


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it must be printable")
    return text


Text = Annotated[str, AfterValidator(_printable)]
Count = Annotated[int, Field(ge=0, lt=1 << 60)]
Number = Annotated[int, Field(ge=-(1 << 64), le=1 << 64)]
Ranks = Annotated[int, Field(ge=1, le=1 << 20)]


@dataclass(frozen=True)
class TableEntry:
    """What a manifest says of a table.

    Attributes:
        weight: name of its weight in the checkpoint.
        rows: of the table.
        columns: of the table.
        dtype: of its weight.
        sharding: of the training that wrote the checkpoint.
        hash_seed: of the hash that makes rows of raw ids; None if ids are rows.
        hash_salt: that the seed and the table's name make; None if ids are rows.
        hot_rows: rows that were replicated on every rank.
        hashing_is_known: whether the fields on hashing say anything.
    """

    __pydantic_config__ = NO_OTHER_KEYS
    weight: Text
    rows: Count
    columns: Count
    dtype: Text
    sharding: Text | None = None
    hash_seed: Number | None = None
    hash_salt: Number | None = None
    hot_rows: Count = 0
    hashing_is_known: bool = True


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds, and how it was written.

    Attributes:
        tables: by name.
        buckets: names of the tables of each bucket, by the path of the module.
        step: steps done; None if the caller did not say.
        world_size: ranks that wrote the checkpoint.
        plan: file of the plan, if there is one.
        hot_rows: file of the ids of hot rows, if there are any.
        files: size and SHA-256 of every other file.
        made_by: versions of what wrote it.
        format: of the file.
        version: of the format.
    """

    __pydantic_config__ = NO_OTHER_KEYS
    tables: dict[Text, TableEntry]
    buckets: dict[Text, list[list[Text]]] = field(default_factory=dict)
    step: Count | None = None
    world_size: Ranks = 1
    plan: Text | None = None
    hot_rows: Text | None = None
    files: dict[Text, dict[str, int | str]] = field(default_factory=dict)
    made_by: dict[Text, Text] = field(default_factory=lambda: {p: version(p) for p in PACKAGES})
    format: str = FORMAT
    version: int = VERSION

    def of_weight(self, weight: str) -> TableEntry | None:
        """Returns the table that has this weight; None if there is none."""
        return next((entry for entry in self.tables.values() if entry.weight == weight), None)

    def write(self, folder: Path) -> None:
        """Writes the manifest into the folder of its checkpoint."""
        write_json(folder / MANIFEST, asdict(self))


def read_manifest(folder: Path) -> Manifest | None:
    """Reads the manifest of a checkpoint; None if there is none.

    Not every checkpoint was written by this package.

    Raises:
        ValueError: it is damaged, or of another version.
    """
    path = folder / MANIFEST
    try:
        data = read_json(folder, MANIFEST)
    except FileNotFoundError:
        return None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{path} is not the manifest of a checkpoint")
    if data.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {shown(data.get('version'))}, this release reads version {VERSION}"
        )
    manifest = from_mapping(Manifest, {"made_by": {}, **data}, f"{path} is damaged")
    for name, about in manifest.files.items():
        check_file_name(name, path)
        if {key: type(value) for key, value in about.items()} != {"bytes": int, "sha256": str}:
            raise ValueError(f"{path} is damaged: files.{name} must have bytes and sha256")
    for other in (manifest.plan, manifest.hot_rows):
        if other is not None:
            check_file_name(other, path)
    return manifest


def describe(
    model: nn.Module, state: Mapping[str, Any], step: int | None, weights: str
) -> Manifest:
    """Returns the manifest of a sharded model, without files.

    Args:
        model: in DistributedModelParallel.
        state: its state dict.
        step: steps done.
        weights: what the names of weights begin with in the checkpoint.
    """
    shardings = _shardings(model)
    modules = dict(fused_tables_of(model))
    hashed = {
        table: fused.options.hash_seed
        for fused in modules.values()
        for table in fused.hashed_tables()
    }
    hot = {name: ids for fused in modules.values() for name, ids in fused.hot_ids().items()}
    tables = {}
    for name, value in state.items():
        path = name.split(".")
        if path[-1] != "weight" or path[-3:-2] not in (["embedding_bags"], ["embeddings"]):
            continue
        table = path[-2]
        if table not in shardings or value.dim() != 2:  # of a module that is not sharded
            continue
        seed = hashed.get(table)
        rows, columns = value.size()
        # Tables of several modules may have one name.
        shown = table if table not in tables else name.removesuffix(".weight")
        tables[shown] = TableEntry(
            weight=f"{weights}.{name}",
            rows=rows,
            columns=columns,
            dtype=str(value.dtype).removeprefix("torch."),
            sharding=shardings.get(table),
            hash_seed=seed,
            hash_salt=None if seed is None else table_salt(table, seed),
            hot_rows=len(hot.get(table, ())),
        )
    buckets = {
        path: [
            [t.name for t in fused.tables.tables[b.first_table : b.end_table]]
            for b in fused.tables.buckets
        ]
        for path, fused in modules.items()
    }
    return Manifest(tables, buckets, step, dist.get_world_size() if dist.is_initialized() else 1)


def hot_set_of(model: nn.Module) -> HotSet | None:
    """Returns the hot rows of a sharded model; None if it has none."""
    modules = [fused for _, fused in fused_tables_of(model)]
    rows = {table.name: table.rows for fused in modules for table in fused.tables.tables}
    ids = {name: hot.numpy() for fused in modules for name, hot in fused.hot_ids().items()}
    return HotSet(rows, ids) if ids else None


def _shardings(model: nn.Module) -> dict[str, str]:
    """Returns the sharding type of each table."""
    return {
        table: sharding.sharding_type
        for module in model.modules()
        for table, sharding in (getattr(module, "module_sharding_plan", None) or {}).items()
    }


def check_hashing(
    manifest: Manifest | None,
    model: nn.Module,
    state: Mapping[str, Any],
    path: Path,
    weights: str,
) -> None:
    """Checks that ids are hashed in the model as they were in the checkpoint.

    Raises:
        ValueError: ids of a table are hashed in another way than in the model.
    """
    if manifest is None:
        return
    here = {entry.weight: entry for entry in describe(model, state, None, weights).tables.values()}
    for name, entry in manifest.tables.items():
        ours = here.get(entry.weight)
        if ours is None or not entry.hashing_is_known:
            continue
        if (ours.hash_seed, ours.hash_salt) == (entry.hash_seed, entry.hash_salt):
            continue
        raise ValueError(
            f"{path}: table {name!r} was trained with {_hashing(entry)}, the model has "
            f"{_hashing(ours)}: rows would be those of other ids. Set hash_ids and hash_seed of "
            "the exchange options as they were"
        )


def _hashing(entry: TableEntry) -> str:
    if entry.hash_seed is None:
        return "ids that are rows"
    return f"ids hashed with hash_seed {entry.hash_seed}"
