"""Reads an optimizer state under the names and shapes that different shardings give it.

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
    """The name of an optimizer state of a table, in its components.

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
        """Names that the same state has with other optimizers."""
        return ALIKE.get(self.state, ())


def number_of_states(names: Iterable[str]) -> int:
    """Returns how many states a table's optimizer has, counts of steps left out."""
    return sum(name not in COUNTS for name in names)


def parse_state(name: str) -> StateName | None:
    """Takes the name of a table's optimizer state apart; None if it is something else."""
    match = STATE.fullmatch(name)
    if match is None:
        return None
    return StateName(name, match["weight"], match["prefix"], match["table"], match["state"])


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
            match = WEIGHT.fullmatch(name)
            if match is not None and name.startswith(f"{weights}."):
                same_ending = self._weights.setdefault(match["weight"], [])
                same_ending.append(name.removeprefix(f"{weights}."))
        self._states: dict[str, dict[str, str]] = {}  # [weight][state] name
        for name in names:
            parsed = None if name.startswith(f"{weights}.") else parse_state(name)
            weight = None if parsed is None else self.weight_of(parsed)
            if parsed is not None and weight is not None:
                self._states.setdefault(weight, {})[parsed.state] = name

    def weight_of(self, state: StateName) -> str | None:
        """Returns the name in the model of the weight that a state belongs to."""
        whole = f".{state.path}{state.weight}"
        fitting = [w for w in self._weights.get(state.weight, ()) if whole.endswith(f".{w}")]
        return max(fitting, key=len, default=None)

    def find(self, weight: str, wanted: StateName) -> str | None:
        """Returns the name that a weight's state has here; None if there is none."""
        names = self.of_weight(weight)
        states = (wanted.state, *wanted.alike)
        return next((names[state] for state in states if state in names), None)

    def of_weight(self, weight: str) -> dict[str, str]:
        """Returns the names of all states of a weight, by what they are."""
        return self._states.get(weight, {})


class StoredState:
    """An optimizer state of a table in a checkpoint, with a number for each row or element.

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
    def column_shards(self) -> int:
        """How many numbers each row has: one for each column shard."""
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
        if self.column_shards == 1:
            self._reader.read(self.name, (first,), into)
            return
        shard_numbers = torch.empty(self.column_shards, into.numel(), dtype=into.dtype)
        for shard, numbers in enumerate(shard_numbers):
            self._reader.read(self.name, (shard * self._rows + first,), numbers)
        if bool((shard_numbers == shard_numbers[0]).all()):
            into.copy_(shard_numbers[0])
            return
        widths = torch.tensor(self._widths(), dtype=torch.float64)
        mean = (shard_numbers.double() * widths[:, None]).sum(0) / widths.sum()
        into.copy_(mean.to(into.dtype))

    def _widths(self) -> Sequence[int]:
        """Returns the columns of each column shard, from the first column on."""
        about = self._reader.tensors.get(self._weight)
        chunks = [] if about is None else about.chunks
        # A shard may be stored in pieces of rows.
        widths = dict(sorted((int(c.offsets[1]), int(c.sizes[1])) for c in chunks if c.sizes[0]))
        if len(widths) != self.column_shards:
            raise ValueError(
                f"{self._reader.path}: {self.name!r} has {self.column_shards} numbers for each "
                f"row, but {self._weight!r} is in {len(widths)} column shards"
            )
        return list(widths.values())

    def count(self) -> float:
        """Returns the steps done, if the state counts these; unused shards count fewer."""
        return float(self._reader.whole(self.name).max())
