"""The lookup in several physical tables by one FBGEMM call, on CUDA.

Every bucket is a feature of the call, with as many bags of each requester as it is asked for.  So
units come back in the order in which they travel, and rows and bags of one physical table need not
be put together first.

Shape suffixes: F features, W requesters, U units, R rows.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

import torch

from fusedrec_torchrec.compat.bucket_table import BucketKernel, settings_of_tables
from fusedrec_torchrec.compat.joint_kernel import JointKernel
from fusedrec_torchrec.compat.joint_table import JointTable, joint_kind
from fusedrec_torchrec.core.buffer_order import as_one
from fusedrec_torchrec.exchange.asked import Asked
from fusedrec_torchrec.exchange.buckets import PhysicalTable
from fusedrec_torchrec.exchange.context import ReceivedRows
from fusedrec_torchrec.exchange.wire_order import in_wire_order

__all__ = ["JointCall", "JointTables", "joint_groups", "joint_tables"]

INT32_MAX = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class JointTables:
    """Physical tables of this rank that one call looks up.

    Attributes:
        tables: their numbers.
        buckets: the numbers of their buckets, ascending: the features of the call.
        tables_of_features: for each of these buckets, which of ``tables`` it is in.
        memory: FBGEMM's table, which all of them are parts of.
    """

    tables: list[int]
    buckets: list[int]
    tables_of_features: list[int]
    memory: JointTable


def joint_tables(
    tables: Sequence[PhysicalTable], rank: int, device: torch.device, frozen: Collection[str]
) -> list[JointTables]:
    """Returns which physical tables are to be looked up in one call, and makes their memory.

    Args:
        tables: all physical tables.
        rank: that is to look them up.
        device: of their rows.
        frozen: names of tables that are not trained.
    """
    if device.type != "cuda":
        return []
    return [_made(members, tables, rank, device) for members in joint_groups(tables, rank, frozen)]


def joint_groups(
    tables: Sequence[PhysicalTable],
    rank: int,
    frozen: Collection[str] = (),
    max_rows: int = INT32_MAX,
) -> list[list[int]]:
    """Returns the numbers of physical tables that one call can look up on CUDA.

    Args:
        tables: all physical tables.
        rank: that is to look them up.
        frozen: names of tables that are not trained.
        max_rows: of one call; FBGEMM numbers the rows of all its tables, with the type of the ids.
    """
    groups: dict[Hashable, list[list[int]]] = {}
    rows_so_far: dict[Hashable, int] = {}
    for number, table in enumerate(tables):
        first = table.config.embedding_tables[0]
        kind = joint_kind(table.config, first.compute_kernel)
        if kind is None:
            continue
        key = kind, first.name in frozen
        groups_of_kind, rows = groups.setdefault(key, [[]]), _rows_of(table, rank)
        total = rows_so_far.get(key, 0) + rows
        if total > max_rows:
            groups_of_kind.append([])
            total = rows
        groups_of_kind[-1].append(number)
        rows_so_far[key] = total
    return [
        members
        for groups_of_kind in groups.values()
        for members in groups_of_kind
        if sum(len(tables[number].buckets) for number in members) > 1
    ]


def _rows_of(table: PhysicalTable, rank: int) -> int:
    """Returns how many there are in FBGEMM's table, which has at least one."""
    return max(sum(t.local_rows for t in table.per_rank[rank].embedding_tables), 1)


def _made(
    members: list[int], tables: Sequence[PhysicalTable], rank: int, device: torch.device
) -> JointTables:
    features = sorted((k, i) for i, number in enumerate(members) for k in tables[number].buckets)
    tables_of_features = [i for _, i in features]
    memory = JointTable(
        [
            (_rows_of(tables[n], rank), tables[n].config.embedding_tables[0].local_cols)
            for n in members
        ],
        tables_of_features,
        **settings_of_tables(tables[members[0]].config, device),
    )
    return JointTables(members, [k for k, _ in features], tables_of_features, memory)


@dataclass(frozen=True)
class JointAsked(Asked):
    """What requesters ask of several buckets, bucket after bucket.

    Attributes:
        of_buckets: what they ask of each.
    """

    of_buckets: tuple[Asked, ...] = ()


class JointCall:
    """Looks up what is asked of several physical tables.

    Args:
        tables: which they are.
        kernels: of all physical tables.
        dims: columns of all buckets.

    Attributes:
        buckets: numbers of the buckets whose units it gives, ascending.
    """

    def __init__(
        self, tables: JointTables, kernels: Sequence[BucketKernel], dims: Sequence[int]
    ) -> None:
        self.buckets = tables.buckets
        self._dims = dims
        own = [kernels[number] for number in tables.tables]
        self._kernel = JointKernel(tables.memory, [own[i] for i in tables.tables_of_features])

    def asked(self, of_buckets: list[Asked], received: ReceivedRows) -> JointAsked:
        """Returns what is asked of the tables, bucket after bucket, requester after requester.

        Args:
            of_buckets: what is asked of each bucket.
            received: the batch.
        """
        own = [of_buckets[k] for k in self.buckets]
        rows_R = as_one([asked.rows_R for asked in own])
        if all(asked.lengths_U is None for asked in own):
            return JointAsked(rows_R, of_buckets=tuple(own))
        lengths = [
            torch.ones_like(asked.rows_R) if asked.lengths_U is None else asked.lengths_U
            for asked in own
        ]
        weights_R = None
        if any(asked.weights_R is not None for asked in own):
            weights_R = as_one(
                [
                    torch.ones_like(asked.rows_R, dtype=torch.float32)
                    if asked.weights_R is None
                    else asked.weights_R
                    for asked in own
                ]
            )
        return JointAsked(rows_R, as_one(lengths), weights_R, tuple(own))

    def look_up(self, asked: Asked, counts: list[list[int]]) -> torch.Tensor:
        """Returns what is asked, flat, in the order (requester, bucket).

        Args:
            asked: of the tables.
            counts: [requester][bucket] units.
        """
        assert isinstance(asked, JointAsked)
        own = asked.of_buckets
        units_FW = [[row[k] for row in counts] for k in self.buckets]
        if self._kernel.can_take(units_FW):
            ids_F = [of_bucket.rows_R.numel() for of_bucket in own]
            return self._kernel(_lookup(asked), ids_F, units_FW)
        looked_up = self._kernel.apart([_lookup(of_bucket) for of_bucket in own])
        return in_wire_order(looked_up, [[k] for k in self.buckets], counts, self._dims)


def _lookup(
    asked: Asked,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    return asked.rows_R, asked.offsets_U1, asked.weights_R
