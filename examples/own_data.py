"""Trains on data of your own with ``fusedrec_torchrec.training.train``, then scores without ranks.

    python examples/own_data.py batches
    python examples/own_data.py frame
    python examples/own_data.py clicks.parquet --label clicked --dense price --sparse item,user
    torchrun --nproc-per-node 2 examples/own_data.py frame

``batches`` is an iterable of (dense, KeyedJaggedTensor, labels), ``frame`` a Polars table; both are
made here, with clicks that follow from the item.  Afterwards the last checkpoint is loaded into
TorchRec's model without any sharding, in this one process, which scores the held-out samples: their
AUC is that of the training.
"""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import polars as pl
import torch
from fusedrec_torchrec import load_checkpoint
from fusedrec_torchrec.training import train
from fusedrec_torchrec.training.data.prepared import PreparedData
from torchmetrics.functional.classification import binary_auroc
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM, DLRMTrain

ITEMS, ROWS, BATCH = 1000, 20_480, 256
DIM, DENSE_ARCH, OVER_ARCH = 16, [32, 16], [32, 1]
Batch = tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]


class Clicks:
    """Is an iterable of batches of one's own, which gives the same ones each time.

    Args:
        batches: how many.
        seed: other seeds give other batches.
    """

    def __init__(self, batches: int, seed: int) -> None:
        self._batches, self._seed = batches, seed

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self._seed)
        for _ in range(self._batches):
            item = torch.randint(ITEMS, (BATCH,), generator=generator)
            lengths = torch.randint(4, (BATCH,), generator=generator)  # a bag may be empty
            viewed = torch.randint(ITEMS, (int(lengths.sum()),), generator=generator)
            features = KeyedJaggedTensor(
                keys=["item", "viewed"],
                values=torch.cat([item, viewed]),
                lengths=torch.cat([torch.ones_like(item), lengths]),
            )
            clicked = torch.rand(BATCH, generator=generator) < 0.1 + 0.6 * (item % 3 == 0)
            yield torch.rand(BATCH, 2, generator=generator), features, clicked.float()


def clicks_frame() -> pl.DataFrame:
    """Returns a table of clicks as it might come from a log."""
    generator = torch.Generator().manual_seed(0)
    item = torch.randint(ITEMS, (ROWS,), generator=generator)
    price = 90 * torch.rand(ROWS, generator=generator)
    clicked = torch.rand(ROWS, generator=generator) < 0.1 + 0.6 * (item % 3 == 0)
    return pl.DataFrame(
        {
            "clicked": clicked.tolist(),
            "price": price.tolist(),
            "item": [f"item {i}" for i in item.tolist()],
            "tags": [["new", "red"][: i % 3] for i in item.tolist()],
        }
    )


@dataclass
class Trained:
    """What is left of a training.

    Attributes:
        result: its last evaluation.
        rows: of each table.
        features: the table of each feature.
        held_out: the samples that it was evaluated on.
    """

    result: dict[str, float]
    rows: dict[str, int]
    features: dict[str, str]
    held_out: list[Batch]


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what all runs have in common; ``train`` also takes it as a YAML file."""
    return {
        "model": {"embedding_dim": DIM, "dense_arch": DENSE_ARCH, "over_arch": OVER_ARCH},
        "optimizer": {"embedding": {"learning_rate": 0.1}, "dense": {"learning_rate": 0.003}},
        "checkpoint": {"every": 100},
        "logging": {"directory": str(options.directory)},
    }


def train_on_batches(options: argparse.Namespace) -> Trained:
    """Trains on an iterable, whose two features look up the same table."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    held_out = [Clicks(8, seed=1000 + of_rank) for of_rank in range(ranks)]
    features = {"item": "item", "viewed": "item"}
    own = {"data": {"source": "python"}, "tables": [{"name": "item", "rows": ITEMS}], "steps": 200}
    result = train(
        Clicks(50, seed=rank),  # every rank brings its share
        settings(options) | own,
        eval_data=held_out[rank],
        features=features,
        resume=options.resume,
        overwrite=options.overwrite,
    )
    return Trained(result, {"item": ITEMS}, features, list(chain.from_iterable(held_out)))


def train_on_table(options: argparse.Namespace) -> Trained:
    """Trains on a Polars frame, or on files, which need not fit into memory.

    Values become rows of tables in the folder of the run, where a tenth of the samples is held out.
    """
    table: dict[str, Any] = {"split": {"by": "random", "share": 0.1}}
    frame: pl.DataFrame | None = None
    if options.data == "frame":
        frame = clicks_frame()
        sparse = {"item": {}, "tags": {"bag": True}}
        table |= {"label": "clicked", "dense": ["price"], "sparse": sparse}
    else:
        bags = {name: {"bag": True} for name in options.bags}
        sparse = {name: {} for name in options.sparse} | bags
        table |= {"label": options.label, "dense": options.dense, "sparse": sparse}
        table["files"] = [options.data]
    data = {"table": table, "batch_size": options.batch_size}
    result = train(
        frame,
        settings(options) | {"data": data, "epochs": 2},
        resume=options.resume,
        overwrite=options.overwrite,
    )
    prepared = PreparedData.open(options.directory / "data")
    held_out = prepared.held_out or 0
    start, whole = prepared.samples - held_out, held_out - held_out % options.batch_size
    batch = batch_of(prepared, start, start + whole)  # evaluations are of whole batches
    return Trained(result, prepared.table_rows, prepared.features, [batch])


def batch_of(prepared: PreparedData, start: int, stop: int) -> Batch:
    """Returns the samples from ``start`` up to ``stop``."""
    samples = prepared.read(start, stop)
    lengths = torch.ones(len(samples.ids), dtype=torch.int32)
    if samples.lengths is not None:  # there are bags
        lengths = torch.from_numpy(samples.lengths.ravel())
    ids = torch.from_numpy(samples.ids)
    features = KeyedJaggedTensor(list(prepared.features), ids, lengths=lengths)
    return torch.from_numpy(samples.dense), features, torch.from_numpy(samples.labels)


def unsharded(run: Path, trained: Trained) -> DLRM:
    """Returns TorchRec's DLRM, all of it in this process, as the last checkpoint has it."""
    tables = []
    for name, rows in trained.rows.items():
        features = [feature for feature, table in trained.features.items() if table == name]
        tables.append(EmbeddingBagConfig(rows, DIM, name, feature_names=features))
    dense_features = trained.held_out[0][0].size(1)
    model = DLRMTrain(DLRM(EmbeddingBagCollection(tables), dense_features, DENSE_ARCH, OVER_ARCH))
    checkpoint = max((run / "checkpoints").glob("step_*"))
    load_checkpoint(checkpoint, model)
    print(f"loaded {checkpoint} into a model without sharding")
    return model.model


@torch.no_grad()
def score(model: DLRM, batches: list[Batch]) -> None:
    """Prints the AUC of the model's predictions, and some of them."""
    predicted = torch.cat([model(dense, ids).squeeze(1).sigmoid() for dense, ids, _ in batches])
    clicked = torch.cat([labels for _, _, labels in batches])
    print(f"AUC of {len(clicked)} held-out samples: {binary_auroc(predicted, clicked.int()):.4f}")
    for i in range(3):
        print(f"  sample {i}: {predicted[i]:.3f}, {'clicked' if clicked[i] else 'not clicked'}")


def names(text: str) -> list[str]:
    """Reads names with commas between them."""
    return [name for name in text.split(",") if name]


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="batches, frame, or a file (parquet, csv, arrow) or folder")
    of_files = parser.add_argument_group("the columns of a file")
    of_files.add_argument("--label", help="column, or an expression such as 'rating >= 4'")
    of_files.add_argument("--dense", type=names, default=[], help="numbers: price,age")
    of_files.add_argument("--sparse", type=names, default=[], help="one id each: item,user")
    of_files.add_argument("--bags", type=names, default=[], help="lists of ids: tags")
    parser.add_argument("--batch-size", type=int, default=128, help="of tables (%(default)s)")
    parser.add_argument("--directory", type=Path, default=Path("runs/own_data"), help="of the run")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_const", const="latest", help="goes on with a run")
    again.add_argument("--overwrite", action="store_true", help="replaces a run")
    options = parser.parse_args()
    if options.data in ("batches", "frame"):
        return options
    if not Path(options.data).exists():
        parser.error(f"{options.data} does not exist; give batches, frame, or a file of yours")
    if options.label is None or not options.sparse + options.bags:
        parser.error(
            f"which columns of {options.data}? Give --label, and --sparse or --bags; "
            f"`fusedrec prepare {options.data} --infer clicks.yaml` tells what is in it"
        )
    return options


def main() -> None:
    """Trains as one of torchrun's ranks, or alone, and scores on the first rank."""
    options = arguments()
    for name in ("torchrec", "torch.fx"):  # which say much about themselves
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        trained = (train_on_batches if options.data == "batches" else train_on_table)(options)
    except ValueError as error:
        sys.exit(f"own_data.py: {error}")
    if os.environ.get("RANK", "0") == "0":
        print(f"AUC of the training: {trained.result['auc']:.4f}")
        score(unsharded(options.directory, trained), trained.held_out)


if __name__ == "__main__":
    main()
