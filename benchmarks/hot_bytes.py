"""How few bytes could a sync of hot rows take?  Four ways, on the batches of Criteo data.

python benchmarks/hot_bytes.py train.txt.gz [--document docs/hot_rows_results.md]

Counts rows; nothing is trained.  Of a row that c of W ranks have touched:

- the fused exchange sends the row to those of them that do not own it and their gradients back:
  2 c (W - 1) / W rows in the mean;
- "to every other rank" sends c gradients to W - 1 ranks, and needs no second round;
- "all-reduce over touched rows" sends 2 (W - 1) rows; ranks must first agree on the rows;
- "sum at the owner, send back" sends c (W - 1) / W gradients in the mean, then W - 1 rows: the
  least that any way of keeping W replicas equal can do, in two rounds;
- "all-reduce over all hot rows" sends 2 (W - 1) rows for every hot row, touched or not.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from ranks import write_into

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.profile import sample_profile
from fusedrec_torchrec.training.data.prepare import prepare
from fusedrec_torchrec.training.data.prepare_options import PrepareOptions
from fusedrec_torchrec.training.data.prepared import PreparedData

BATCH, DIM = 2048, 64
ROW_BYTES = 4 * DIM
CASES = [(2000, "all"), (20_000, "all"), (20_000, "hot")]  # hot rows, batches
RANKS = (2, 4, 8)
WAYS = (
    "fused exchange",
    "to every other rank",
    "all-reduce over touched rows",
    "sum at the owner, send back",
    "all-reduce over all hot rows",
)


def hot_keys(data: PreparedData, hot_set: HotSet, batches: str) -> NDArray[np.int64]:
    """Returns [samples, tables] keys of rows, tables one after another; -1 if not hot."""
    samples = data.read(0, data.samples)
    if batches == "hot":
        samples = samples.take(np.flatnonzero(hot_set.hot_samples(samples)))
    columns, first = [], 0
    ids_of_tables = samples.ids.reshape(-1, len(samples))
    for (name, rows), ids in zip(data.table_rows.items(), ids_of_tables, strict=True):
        columns.append(np.where(np.isin(ids, hot_set.ids[name]), ids + first, -1))
        first += rows
    return np.stack(columns, axis=1)


def rows_sent(keys: NDArray[np.int64], hot_rows: int, ranks: int) -> NDArray[np.float64]:
    """Returns the mean number of rows that all ranks send in a step, for each way."""
    steps = len(keys) // (BATCH * ranks)
    total = np.zeros(len(WAYS))
    for batches in keys[: steps * BATCH * ranks].reshape(steps, ranks, -1):
        touched = [np.unique(batch[batch >= 0]) for batch in batches]
        used = sum(map(len, touched))
        union = len(np.unique(np.concatenate(touched)))
        total += (
            2 * used * (ranks - 1) / ranks,
            used * (ranks - 1),
            2 * (ranks - 1) * union,
            used * (ranks - 1) / ranks + (ranks - 1) * union,
            2 * (ranks - 1) * hot_rows,
        )
    return total / steps


def table(data: PreparedData) -> str:
    """Returns the bytes in Markdown."""
    profile = sample_profile(data, 1.0, 1 << 21)
    lines = [f"| hot rows, batches, ranks | {' | '.join(WAYS)} |", "|---" * (len(WAYS) + 1) + "|"]
    for hot_rows, batches in CASES:
        keys = hot_keys(data, HotSet.most_used(profile, hot_rows), batches)
        for ranks in RANKS:
            sent = rows_sent(keys, hot_rows, ranks) * ROW_BYTES / 2**20
            cells = " | ".join(f"{value:.1f}" for value in sent)
            lines.append(f"| {hot_rows}, {batches}, {ranks} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="a text file in Criteo's format")
    parser.add_argument("--document", type=Path, help="document to write the table into")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = PrepareOptions(on_bad_line="skip")
        try:
            data = prepare([arguments.data], Path(folder) / "prepared", options)
        except ValueError as error:
            parser.error(str(error))
        text = table(data)
    print(text)
    if arguments.document is not None:
        write_into(arguments.document, "bytes", text)


if __name__ == "__main__":
    main()
