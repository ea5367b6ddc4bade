"""How many bytes each kernel reads and writes, from shapes alone, and the least that it could.

*Asked* is what programs load and store: a row that is needed twice counts twice, an atomic
addition is a read and a write.  *Once* is every distinct element that a kernel touches, read once
and written once: what goes to memory if the second cache (40 MB on an A100, 50 MB on an H100) holds
a batch's rows during a kernel, and nothing from one kernel to the next.  *Least* is every distinct
element of an operator's inputs once, and every element of its results once: its intermediate
results, such as the hash table, cost nothing there.  Tables of slots and parts, some hundred
numbers that stay in the first cache, do not count.

One bucket, no weights, no hot rows, keys of four bytes.
"""

from dataclasses import dataclass

__all__ = ["Bytes", "Shape", "kernels"]

ID, KEY, LENGTH, NUMBER = 8, 4, 4, 4


@dataclass(frozen=True)
class Shape:
    """Is the batch of one rank.

    Attributes:
        ids: of all features.
        unique: distinct rows among them.
        bags: of all features.
        asked: rows that all ranks ask of this one.
        dim: columns.
    """

    ids: float
    unique: float
    bags: float
    asked: float
    dim: int

    @property
    def places(self) -> int:
        """Places of the hash table, as ``row_numbers`` makes it."""
        return int(1 << max((2 * int(self.ids) - 1).bit_length(), 6))

    @property
    def probes(self) -> float:
        """Places that an id looks at, in the mean: linear probing, when the table is as full."""
        return (1 + 1 / (1 - self.unique / self.places)) / 2


@dataclass(frozen=True)
class Bytes:
    """Is what a kernel reads and writes, and the least that it could.

    Attributes:
        kernel: its name; the first word is the operator's.
        stage: of the cost model.
        asked: bytes that its programs load and store.
        once: the same, every element once.
        least: bytes that its operator cannot do without.
    """

    kernel: str
    stage: str
    asked: float
    once: float
    least: float


def kernels(shape: Shape) -> list[Bytes]:
    """Returns the kernels of a step of ``fused_row_wise``, in the order of the data path.

    What an operator of several kernels needs at least stands where it is read or written first.
    """
    n, u, b, h = shape.ids, shape.unique, shape.bags, shape.places
    row = NUMBER * shape.dim
    bags, numbers = LENGTH * b, 4 * n
    insert = (ID + 4) * n + KEY * u
    sums = numbers + bags + row * (u + b)
    return [
        Bytes("offsets", "dedup", *[2 * bags] * 3),
        Bytes("bad_lengths", "dedup", 2 * bags, 2 * bags, bags),
        Bytes("number_batch_rows: zeros", "dedup", KEY * h, KEY * h, 0),
        # Reads of places where ids do not look do not happen.
        Bytes(
            "number_batch_rows: insert", "dedup",
            insert + KEY * shape.probes * n, insert + KEY * min(h, shape.probes * n), ID * n,
        ),
        Bytes("number_batch_rows: number", "dedup", KEY * h + 4 * u, KEY * h + 4 * u, 0),
        Bytes("number_batch_rows: place", "dedup", KEY * h + 12 * u, KEY * h + 12 * u, KEY * u),
        Bytes(
            "number_batch_rows: rows_of_ids", "dedup",
            3 * numbers, 2 * numbers + 4 * u, numbers,
        ),
        Bytes("pack_rows", "dedup", *[(KEY + 4) * u] * 3),
        Bytes("unpack", "lookup", *[8 * shape.asked] * 3),
        Bytes("slot_bag_sums", "pooling", numbers + 2 * bags + row * (n + b), sums, sums),
        Bytes("slot_row_sums: zeros", "pooling_backward", row * u, row * u, 0),
        Bytes(
            "slot_row_sums", "pooling_backward",
            numbers + 2 * bags + row * (2 * n + b), sums + row * u, sums,
        ),
    ]  # fmt: skip
