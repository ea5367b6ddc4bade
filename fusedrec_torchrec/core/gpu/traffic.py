"""How many bytes each kernel reads and writes, from shapes alone, and the least that it could.

*Asked* is what programs load and store: a row that is needed twice counts twice, an atomic
addition is a read and a write.  *Once* is every distinct element that a kernel touches, read once
and written once: what goes to memory if the second cache (40 MB on an A100, 50 MB on an H100) holds
a batch's rows during a kernel, and nothing from one kernel to the next.  *Least* is every distinct
element of an operator's inputs once, and every element of its results once: its intermediate
results, such as the hash table, cost nothing there.  Tables of slots and parts, some hundred
numbers that stay in the first cache, do not count.

One bucket, sums, no weights, no hot rows, keys of four bytes.
"""

from dataclasses import dataclass

from fusedrec_torchrec.core.gpu.segments import places_for

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
        long: distinct rows with more than a few ids, see ``segments``.
        pieces: of these.
    """

    ids: float
    unique: float
    bags: float
    asked: float
    dim: int
    long: float = 0.0
    pieces: float = 0.0

    @property
    def places(self) -> int:
        """Places of the hash table, as ``row_numbers`` makes it."""
        return places_for(int(self.ids))

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
    long, pieces = shape.long, shape.pieces
    row = NUMBER * shape.dim
    bags, numbers = LENGTH * b, 4 * n
    insert = (ID + 8) * n + (KEY + 4) * u  # place and rank of each id, key and number of a row
    rows = 2 * numbers + (KEY + 12) * u  # place and row of an id; key, ids and segment of a row
    place_bags = 3 * numbers + 4 * pieces + row * long
    row_sums = numbers + 8 * u + 12 * pieces + row * (u - long)
    sums = numbers + bags + row * (u + b)
    return [
        Bytes("offsets", "dedup", *[2 * bags] * 3),
        Bytes("bad_lengths", "dedup", 2 * bags, 2 * bags, bags),
        Bytes("number_batch_rows: zeros", "dedup", 2 * KEY * h, 2 * KEY * h, 0),
        # Reads of places where ids do not look do not happen; all ids but the first of a row count
        # themselves, at no more places than there are rows or such ids.  Whoever takes no place
        # when others of its program do looks at one of its own, once.
        Bytes(
            "number_batch_rows: insert", "dedup",
            insert + KEY * (shape.probes * n + n - u) + 2 * KEY * (n - u),
            insert + KEY * min(h, shape.probes * n + n - u) + 2 * KEY * min(u, n - u), ID * n,
        ),
        Bytes(
            "number_batch_rows: rows_of_ids", "dedup",
            rows + (KEY + 4) * n, rows + (KEY + 4) * u, numbers + KEY * u,
        ),
        Bytes("pack_rows", "dedup", *[(KEY + 4) * u] * 3),
        Bytes("unpack", "lookup", *[8 * shape.asked] * 3),
        Bytes("slot_bag_sums", "pooling", numbers + 2 * bags + row * (n + b), sums, sums),
        Bytes(
            "slot_row_sums: place_bags", "pooling_backward",
            place_bags + numbers + 2 * bags, place_bags + 4 * u + bags, numbers + bags,
        ),
        # A piece is added to its row: read and written.
        Bytes(
            "slot_row_sums: sums", "pooling_backward",
            row_sums + 4 * u + row * (n + 2 * pieces), row_sums + row * (b + 2 * long),
            row * (u + b),
        ),
    ]  # fmt: skip
