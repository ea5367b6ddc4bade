"""One optimizer state under the names and shapes that it has in different shardings.

TorchRec names the state of a table by its sharding (its issue 2394).  A table ``a`` has

    ...a.weight.a.momentum1, ...a.weight.a.exp_avg_sq    sharded, with FBGEMM's fused optimizers
    ...a.weight.sum or exp_avg, ...a.weight.exp_avg_sq   data-parallel, with torch's optimizers

and a state with one number for each row has different shapes:

    [rows]            in shards of rows, or whole
    [rows * shards]   column-wise: the numbers of one column shard after those of the other
    [rows, 1]         data-parallel

Numbers of column shards are of their own columns.  From them to one number for the row it is their
mean, by columns: for AdaGrad the mean of squares over all columns, which is what that number would
be.  In the other direction every column shard gets the number of the row.  So a state that goes to
column shards and back is the same to the last bit.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fusedrec_torchrec.checkpoint.reader import CheckpointReader

__all__ = ["COUNTS", "StateName", "StateNames", "StoredState", "number_of_states", "parse_state"]

STATE = re.compile(
    r"(?P<prefix>(?:.*\.)?)(?P<weight>(?:embedding_bags|embeddings)\.(?P<table>[^.]+)\.weight)\."
    r"(?:(?P=table)\.)?(?P<state>[^.]+)"
)
WEIGHT = re.compile(r".*?(?P<weight>(?:embedding_bags|embeddings)\.(?P<table>[^.]+)\.weight)")
COUNTS = ("iter", "step")
# What torch's optimizers call a state of FBGEMM's, and the other way round.
ALIKE = {
    "momentum1": ("sum", "exp_avg"),
    "sum": ("momentum1",),
    "exp_avg": ("momentum1",),
    "momentum2": ("exp_avg_sq",),
    "exp_avg_sq": ("momentum2",),
    "iter": ("step",),
    "step": ("iter",),
}


@dataclass(frozen=True)
class StateName:
    """A name of an optimizer state of a table.

    Attributes:
        name: as it is in the state dict.
        weight: the table's weight, from the module that holds it on.
        path: of that module, with whatever stands before it.
        table: name of the table.
        state: ``momentum1``, ``sum``, and so on.
    """

    name: str
    weight: str
    path: str
    table: str
    state: str

    @property
    def alike(self) -> tuple[str, ...]:
        """Names of the same state elsewhere."""
        return ALIKE.get(self.state, ())


def number_of_states(names: Iterable[str]) -> int:
    """Of a table, but for counts of steps: optimizers differ in it."""
    return sum(name not in COUNTS for name in names)


def parse_state(name: str) -> StateName | None:
    """None if it is not a name of a table's optimizer state."""
    found = STATE.fullmatch(name)
    if found is None:
        return None
    return StateName(name, found["weight"], found["prefix"], found["table"], found["state"])


class StateNames:
    """The optimizer states of tables among the names of a checkpoint or a state dict.

    Whatever stands before the name of the weight, a key of TorchRec's ``CombinedOptimizer``, say,
    makes no difference.

    Args:
        names: of all tensors; those of weights begin with ``weights``.
        weights: what they begin with.
    """

    def __init__(self, names: Iterable[str], weights: str) -> None:
        names = list(names)
        self._weights: dict[str, list[str]] = {}
        for name in names:
            found = WEIGHT.fullmatch(name)
            if found is not None and name.startswith(f"{weights}."):
                known = self._weights.setdefault(found["weight"], [])
                known.append(name.removeprefix(f"{weights}."))
        self._found: dict[str, dict[str, str]] = {}
        for name in names:
            parsed = None if name.startswith(f"{weights}.") else parse_state(name)
            weight = None if parsed is None else self.weight_of(parsed)
            if parsed is not None and weight is not None:
                self._found.setdefault(weight, {})[parsed.state] = name

    def weight_of(self, state: StateName) -> str | None:
        """Name of the weight that a state is of, in the model."""
        whole = f".{state.path}{state.weight}"
        known = [w for w in self._weights.get(state.weight, ()) if whole.endswith(f".{w}")]
        return max(known, key=len, default=None)

    def find(self, weight: str, wanted: StateName) -> str | None:
        """The same state of a weight, perhaps under another name; None if there is none."""
        of_table = self._found.get(weight, {})
        states = (wanted.state, *wanted.alike)
        return next((of_table[state] for state in states if state in of_table), None)

    def of_weight(self, weight: str) -> dict[str, str]:
        """Names of all states of a weight."""
        return self._found.get(weight, {})


class StoredState:
    """An optimizer state of a table in a checkpoint, as numbers of rows or of elements.

    Args:
        reader: of the checkpoint.
        name: of the state.
        rows: of the table.
        columns: of the table.
        weight: name of the table's weight in the checkpoint, whose shards tell the columns.
    """

    def __init__(
        self, reader: CheckpointReader, name: str, rows: int, columns: int, weight: str
    ) -> None:
        self._reader, self.name = reader, name
        self._rows, self._columns, self._weight = rows, columns, weight
        self.size = reader.tensors[name].size

    @property
    def by_element(self) -> bool:
        """Whether there is a number for each element of the table."""
        return tuple(self.size) == (self._rows, self._columns) and self._columns > 1

    @property
    def is_single(self) -> bool:
        """Whether there is one number for the table, or for each of its shards."""
        return len(self.size) < 2 and (not self._rows or self.size.numel() % self._rows != 0)

    @property
    def replicas(self) -> int:
        """Numbers that each row has, one for each column shard."""
        if self.by_element:
            return 1
        count = self.size.numel()
        if len(self.size) > 2 or not self._rows or count % self._rows:
            raise ValueError(
                f"{self._reader.path}: {self.name!r} has shape {tuple(self.size)}, which no "
                f"sharding of a table with {self._rows} rows has"
            )
        return count // self._rows

    def rows(self, first: int, into: torch.Tensor) -> None:
        """Fills a tensor with one number for each row, from ``first`` on."""
        if len(self.size) == 2:
            self._reader.read(self.name, (first, 0), into.view(-1, 1))
            return
        if self.replicas == 1:
            self._reader.read(self.name, (first,), into)
            return
        of_shards = torch.empty(self.replicas, into.numel(), dtype=into.dtype)
        for shard, numbers in enumerate(of_shards):
            self._reader.read(self.name, (shard * self._rows + first,), numbers)
        if bool((of_shards == of_shards[0]).all()):
            into.copy_(of_shards[0])
            return
        widths = torch.tensor(self._widths(), dtype=torch.float64)
        mean = (of_shards.double() * widths[:, None]).sum(0) / widths.sum()
        into.copy_(mean.to(into.dtype))

    def _widths(self) -> Sequence[int]:
        """Columns of each column shard, from the first column on."""
        about = self._reader.tensors.get(self._weight)
        chunks = [] if about is None else about.chunks
        # A shard may be stored in pieces of rows.
        found = dict(sorted((int(c.offsets[1]), int(c.sizes[1])) for c in chunks if c.sizes[0]))
        if len(found) != self.replicas:
            raise ValueError(
                f"{self._reader.path}: {self.name!r} has {self.replicas} numbers for each row, "
                f"but {self._weight!r} is in {len(found)} column shards"
            )
        return list(found.values())

    def count(self) -> float:
        """Steps done, if that is what the state is; shards agree, or have not been used yet."""
        return float(self._reader.whole(self.name).max())
