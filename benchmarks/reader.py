"""Is the reader ever the bottleneck?  Samples/s of the reader alone against the training step.

python benchmarks/reader.py train.txt.gz [--workers 0 1 2] [--pairs 5]

Reads and trains in turn, so that both see the same noise, and reports the median of the ratios.
One rank, one thread; a rank of a larger run reads only its own share, so the ratio carries over.
Row groups are small here, so that the cache of a reader holds only a part of a small file; a
measurement of the reader is long, so that what was read ahead in the meantime counts for little.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from fusedrec_torchrec.access.samples import Source
from fusedrec_torchrec.core.terminal import print_table
from fusedrec_torchrec.training.arguments import load_config
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.data.loader import Loader
from fusedrec_torchrec.training.data.own_batches import OwnLoader
from fusedrec_torchrec.training.data.prepare import prepare
from fusedrec_torchrec.training.data.prepare_options import PrepareOptions
from fusedrec_torchrec.training.data.separated_loader import SeparatedLoader
from fusedrec_torchrec.training.loaders import train_loader
from fusedrec_torchrec.training.model import build_model, shard_model
from fusedrec_torchrec.training.optimizers import build_optimizer

CONFIG = "configs/criteo_kaggle.yaml"
CPU = torch.device("cpu")
READ_MORE = 20


class Trainer:
    """Training steps on batches that are in memory already."""

    def __init__(self, config: TrainConfig, source: Source, steps: int) -> None:
        model, _ = shard_model(build_model(config.model, source, CPU), config, source, CPU)
        optimizer = build_optimizer(model, config.optimizer, 10**6)
        self._pipeline = TrainPipelineSparseDist(model, optimizer, CPU)
        self._batches = list(train_loader(config, source, 0, 1).read(0, steps))

    def seconds(self) -> float:
        begun = time.perf_counter()
        stream = iter(self._batches)
        for _ in self._batches:
            self._pipeline.progress(stream)
        return time.perf_counter() - begun


class Reader:
    """Reads on from where it was, without a break between two measurements."""

    def __init__(self, loader: Loader | SeparatedLoader | OwnLoader) -> None:
        self._stream = loader.read(0)
        next(self._stream)  # starts the processes

    def seconds(self, batches: int) -> float:
        begun = time.perf_counter()
        for _ in range(batches):
            next(self._stream)
        return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="a text file in Criteo's format")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=48, help="batches of one measurement")
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        prepared = Path(folder) / "prepared"
        options = PrepareOptions(min_count=3, group_rows=1024, on_bad_line="skip")
        source = prepare([arguments.data], prepared, options, progress=False)
        settings = [
            "data.criteo.files=[]",
            f"data.criteo.prepared={prepared}",
            f"data.batch_size={arguments.batch_size}",
            "data.workers=0",
        ]
        config = load_config(CONFIG, settings)
        trainer = Trainer(config, source, arguments.steps)
        trainer.seconds()
        rows = []
        for workers in arguments.workers:
            worker_config = load_config(CONFIG, [*settings, f"data.workers={workers}"])
            reader = Reader(train_loader(worker_config, source, 0, 1))
            pairs = [
                (reader.seconds(READ_MORE * arguments.steps), trainer.seconds())
                for _ in range(arguments.pairs)
            ]
            samples = arguments.steps * arguments.batch_size
            rows.append(
                (
                    workers,
                    round(READ_MORE * samples / median(read for read, _ in pairs)),
                    round(samples / median(trained for _, trained in pairs)),
                    f"{median(READ_MORE * trained / read for read, trained in pairs):.1f}",
                )
            )
            del reader
        print_table(
            f"reader against training step, batch {arguments.batch_size}, one rank",
            ("workers", "reader samples/s", "training samples/s", "reader / training"),
            rows,
        )
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
