"""Plan files: a sharding plan and its settings, for people, for ``diff``, and for training.

A file holds all of a plan, whoever made it: reading it back gives an equal plan.  Rows on ranks are
written as ``12 x 4, 10``: four ranks with 12 rows, then one with 10.  Ids of hot rows, of which
there may be many, are in a file of their own beside it, as ``fusedrec profile --hot-set`` writes.
"""

import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.codecs.options import Codecs
from fusedrec_torchrec.core.config import from_mapping, load_yaml, section, to_mapping
from fusedrec_torchrec.core.files import write_text
from fusedrec_torchrec.core.folder_files import check_file_name, open_in_folder, shown
from fusedrec_torchrec.exchange.options import ExchangeOptions, InputDist
from fusedrec_torchrec.hot.options import HotOptions, HotRule
from fusedrec_torchrec.sharding.grid_options import GridOptions

__all__ = [
    "Placed",
    "PlanFile",
    "TablePlan",
    "digest_of",
    "read_plan",
    "shards_of",
    "table_plan_of",
    "write_plan",
    "written_shards",
]

VERSION = 1
MOST_RANKS = 1 << 20
RUN = re.compile(r"(\d+)(?: x (\d+))?")


@section
class TablePlan:
    """Describes how one table is sharded.

    Attributes:
        rows: of the table.
        columns: of the table.
        sharding: a fused sharding type, or one of TorchRec.
        kernel: compute kernel of TorchRec.
        ranks: ranks that have shards, in the order of the shards; all ranks if none.
        rows_per_rank: rows of each shard, if shards are rows.
        columns_per_rank: columns of each shard, if shards are columns.
        shards: [offsets, sizes] of each shard, if they are neither.
        hot_rows: how many rows are replicated on every rank; which ones is in hot_file.
        hot_rule: what rows are, if not by their ids.
        codecs: how its rows and gradients travel; as those of the other tables if none.
    """

    rows: int
    columns: int
    sharding: str
    kernel: str = "fused"
    ranks: list[int] | None = None
    rows_per_rank: str | None = None
    columns_per_rank: str | None = None
    shards: list[list[list[int]]] | None = None
    hot_rows: int = 0
    hot_rule: HotRule | None = None
    codecs: Codecs | None = None


@section
class PlanFile:
    """Holds all that a plan file says.

    Attributes:
        version: of this format.
        ranks: that the plan is for, of all groups.
        ranks_per_node: of a group, on one node.
        device: where tables live.
        grid: 2D parallelism: the plan is that of one group.
        input_dist: how ids of fused tables travel; as sharders say if none.
        hot_sync_every: steps from one sync of hot rows to the next.
        hot_file: file of the hot rows, in the folder of this one.
        hot_digest: of the hot rows, so that a file of others is refused.
        codecs: how rows and gradients of fused tables travel; as sharders say if none.
        expected: what the cost model expects.
        tables: by table name.
    """

    version: Literal[1] = 1
    ranks: int = Field(ge=1, le=MOST_RANKS)
    ranks_per_node: int = Field(default=1, ge=1, le=MOST_RANKS)
    device: str = "cpu"
    grid: GridOptions | None = None
    input_dist: InputDist | None = None
    hot_sync_every: int = Field(default=1, ge=1)
    hot_file: str | None = None
    hot_digest: str | None = None
    codecs: Codecs | None = None
    expected: dict[str, float] = Field(default={})
    tables: dict[str, TablePlan]

    def check_device(self, device: str, source: str) -> None:
        """Refuses to be used on another device than the plan was made for.

        Raises:
            ValueError: the plan is for another device.
        """
        if device != self.device:
            raise ValueError(
                f"{source} is a plan for {self.device}, here is {device}: plan again for a cluster "
                f"with device: {device}"
            )

    def check_ranks(self, ranks: int, source: str) -> None:
        """Refuses to be used by another number of ranks than the plan was made for.

        Raises:
            ValueError: the plan is for another number of ranks.
        """
        if ranks != self.ranks:
            raise ValueError(
                f"{source} is a plan for {self.ranks} ranks, here are {ranks}: plan again with "
                f"`fusedrec plan --ranks {ranks}`, or launch {self.ranks}"
            )

    def check_tables(self, names: Collection[str], source: str) -> None:
        """Refuses to be used for a model with other tables than the plan was made for.

        Raises:
            ValueError: a table is planned that the model does not have, or is not planned.
        """
        for name in self.tables:
            if name not in names:
                raise ValueError(
                    f"{source} plans table {name!r}, which the model does not have; it has "
                    f"{', '.join(sorted(names)[:20])}"
                )
        for name in names:
            if name not in self.tables:
                raise ValueError(f"{source} does not plan table {name!r} of the model: plan again")

    def exchange_options(self, base: ExchangeOptions) -> ExchangeOptions:
        """Returns the settings of the exchange, with what the plan says and they do not."""
        if self.input_dist is not None:
            base = replace(base, input_dist=self.input_dist)
        return base if base.codecs is not None else replace(base, codecs=self.codecs)

    def hot_options(self, base: HotOptions) -> HotOptions:
        return replace(base, sync_every=self.hot_sync_every) if self.hot_file else base


Places = list[tuple[tuple[int, ...], tuple[int, ...]]]
Placed = tuple[int, tuple[int, ...], tuple[int, ...]]  # rank, offsets, sizes


def _row_shards(sizes: Sequence[int], columns: int) -> Places:
    starts = accumulate(sizes, initial=0)
    return [((start, 0), (size, columns)) for start, size in zip(starts, sizes, strict=False)]


def _column_shards(sizes: Sequence[int], rows: int) -> Places:
    starts = accumulate(sizes, initial=0)
    return [((0, start), (rows, size)) for start, size in zip(starts, sizes, strict=False)]


def _runs(numbers: Sequence[int]) -> str:
    """Writes ``[3, 3, 1]`` as ``3 x 2, 1``."""
    runs = [(value, sum(1 for _ in same)) for value, same in groupby(numbers)]
    return ", ".join(f"{value} x {times}" if times > 1 else str(value) for value, times in runs)


def _numbers(text: str, where: str) -> list[int]:
    numbers: list[int] = []
    for run in text.split(","):
        match = RUN.fullmatch(run.strip())
        if match is None:
            raise ValueError(f"{where} is {text!r}, must be numbers such as '12 x 4, 10'")
        times = int(match[2] or 1)
        if len(numbers) + times > MOST_RANKS:
            raise ValueError(f"{where} has shards on more than {MOST_RANKS} ranks")
        numbers += [int(match[1])] * times
    return numbers


def digest_of(hot_set: HotSet) -> str:
    """Returns a text that tells the hot rows of one plan from those of another."""
    digest = hashlib.sha256()
    for name, ids in sorted(hot_set.ids.items()):
        digest.update(name.encode() + ids.tobytes())
    return digest.hexdigest()[:16]


def write_plan(path: Path, file: PlanFile, hot_set: HotSet | None = None) -> None:
    """Writes a plan, and its hot rows beside it."""
    if hot_set is not None:
        beside = path.with_suffix(".hot.npz")
        hot_set.save(beside)
        file = replace(file, hot_file=beside.name)
    data = to_mapping(file)
    # What is as usual is left out, so that what was decided stands out.
    tables = data.pop("tables")
    data = {key: value for key, value in data.items() if value not in (None, {})}
    lines = [yaml.safe_dump(data, sort_keys=False, width=100), "tables:\n"]
    for name, table in tables.items():
        short = {key: value for key, value in table.items() if value not in (None, 0)}
        flow = yaml.safe_dump({name: short}, default_flow_style=None, sort_keys=False, width=10**9)
        lines += [f"  {line}\n" for line in flow.splitlines()]
    write_text(path, "".join(lines))


def read_plan(path: Path) -> tuple[PlanFile, HotSet | None]:
    """Reads a plan file and its hot rows.

    Raises:
        ValueError: no such file, no plan, of a later version, or its hot rows are missing.
    """
    data = load_yaml(path)
    if "tables" not in data or "version" not in data:
        raise ValueError(f"{path} is no plan file: version and tables are missing")
    if data["version"] != VERSION:
        raise ValueError(f"{path} is a plan of version {data['version']}, must be {VERSION}")
    names = data.get("codecs")
    if isinstance(names, list) and len(names) == 2:  # as the first release wrote them
        data["codecs"] = {"forward": {"type": names[0]}, "backward": {"type": names[1]}}
        if names == ["fp32", "fp32"]:
            del data["codecs"]
    if isinstance(data["tables"], dict):
        for table in data["tables"].values():
            if isinstance(table, dict):
                for key in ("rows", "columns"):
                    table.setdefault(key, 0)
                for key in ("rows_per_rank", "columns_per_rank"):
                    if isinstance(table.get(key), int):  # one number is not a text to YAML
                        table[key] = str(table[key])
    file = from_mapping(PlanFile, data, str(path))
    for name, planned in file.tables.items():
        for shard in planned.shards or ():
            if [len(numbers) for numbers in shard] != [2, 2] or min(map(min, shard)) < 0:
                raise ValueError(
                    f"{path}: tables.{name}.shards has {shown(shard)}, must have two offsets and "
                    "two sizes of 0 or more"
                )
    if file.hot_file is None:
        return file, None
    name = check_file_name(file.hot_file, path)
    try:
        with open_in_folder(path.parent, name) as hot_file:
            hot_set = HotSet.read(hot_file, path.parent / name)
    except OSError:
        raise ValueError(f"hot set {path.parent / name} does not exist") from None
    if digest_of(hot_set) != file.hot_digest:
        raise ValueError(
            f"{file.hot_file} has other hot rows than {path} was made with: plan again, or bring "
            "back the file"
        )
    return file, hot_set


def shards_of(
    name: str, plan: TablePlan, rows: int, columns: int, ranks: int
) -> list[Placed] | None:
    """Returns rank, offsets and sizes of each shard of a table; None if all ranks hold all of it.

    Raises:
        ValueError: shards do not make up the table, or there are not as many as ranks.
    """
    places: Places
    if plan.rows_per_rank is not None:
        sizes = _numbers(plan.rows_per_rank, f"tables.{name}.rows_per_rank")
        if sum(sizes) != rows:
            raise ValueError(
                f"tables.{name}.rows_per_rank adds up to {sum(sizes)}, must to {rows} rows"
            )
        places = _row_shards(sizes, columns)
    elif plan.columns_per_rank is not None:
        sizes = _numbers(plan.columns_per_rank, f"tables.{name}.columns_per_rank")
        if sum(sizes) != columns:
            raise ValueError(
                f"tables.{name}.columns_per_rank adds up to {sum(sizes)}, must to {columns}"
            )
        places = _column_shards(sizes, rows)
    elif plan.shards is not None:
        places = [(tuple(offset), tuple(size)) for offset, size in plan.shards]
    else:
        return None
    on_ranks = list(range(ranks)) if plan.ranks is None else plan.ranks
    if len(places) != len(on_ranks) or not all(0 <= rank < ranks for rank in on_ranks):
        raise ValueError(
            f"tables.{name} has {len(places)} shards on ranks {on_ranks}, must be one on each "
            f"and ranks below {ranks}"
        )
    return [(rank, *place) for rank, place in zip(on_ranks, places, strict=True)]


def table_plan_of(
    sharding: str,
    rows: int,
    columns: int,
    shards: Sequence[tuple[int, Sequence[int], Sequence[int]]],
) -> TablePlan:
    """Returns a table's part of a file, from rank, offsets and sizes of each shard."""
    given: dict[str, Any] = {"sharding": sharding, "rows": rows, "columns": columns}
    given["ranks"] = [rank for rank, _, _ in shards]
    places = [(tuple(offset), tuple(size)) for _, offset, size in shards]
    return TablePlan(**given, **written_shards(places, rows, columns))


def written_shards(places: Places, rows: int, columns: int) -> dict[str, Any]:
    """Returns how shards are written."""
    row_sizes, column_sizes = ([size[k] for _, size in places] for k in (0, 1))
    # A shard without rows may have no columns either: TorchRec writes [0, columns] or [0, 0].
    if places == _row_shards(row_sizes, columns):
        return {"rows_per_rank": _runs(row_sizes)}
    if places == _column_shards(column_sizes, rows):
        return {"columns_per_rank": _runs(column_sizes)}
    return {"shards": [[list(offset), list(size)] for offset, size in places]}
