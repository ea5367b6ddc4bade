"""What the checks for bad batches cost: steps with and without, side by side.

    python benchmarks/guard_overhead.py --document docs/reliability.md

Trainings of ``configs/tiny.yaml`` on two ranks, one after another in turn; medians of the ratios of
neighbours.
"""

import argparse
import statistics
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from ranks import on_ranks, write_into

from fusedrec_torchrec.core.config import from_mapping, load_yaml, with_overrides
from fusedrec_torchrec.training.bad_batches import BadBatches
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.loop import Training
from fusedrec_torchrec.training.source import open_source

ROOT = Path(__file__).parents[1]
STEPS = 400


def speed(folder: str, gradients: bool, batches: bool) -> float:
    """Returns the samples a second of one training."""
    overrides = [
        *(f"steps={STEPS}", "eval_every=0", "eval_batches=1", "checkpoint.every=0"),
        *(f"logging.directory={folder}", "logging.tensorboard=false", "logging.plots=false"),
        f"bad_batches.gradients={str(gradients).lower()}",
    ]
    data = with_overrides(load_yaml(ROOT / "configs" / "tiny.yaml"), overrides)
    config = from_mapping(TrainConfig, data)

    def unwatched(self: Any, batches: Any, first: int) -> Any:
        for step, batch in enumerate(batches, first):
            self._coming.append((step, False))
            yield batch

    patch: Any = nullcontext() if batches else mock.patch.object(BadBatches, "watch", unwatched)
    with patch:
        training = Training(config, open_source(config), torch.device("cpu"), None)
        return training.run()["samples_per_second"]


def rank(pairs: int, folder: str) -> list[tuple[float, float, float]]:
    torch.set_num_threads(1)
    speed(f"{folder}/warm", True, True)
    return [
        (
            speed(f"{folder}/{pair}_all", True, True),
            speed(f"{folder}/{pair}_batches", False, True),
            speed(f"{folder}/{pair}_none", False, False),
        )
        for pair in range(pairs)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--document", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = on_ranks(2, rank, arguments.pairs, folder)
    both = statistics.median(none / all_ for all_, _, none in results)
    batches = statistics.median(none / only for _, only, none in results)
    milliseconds = statistics.median(2048 / none for _, _, none in results) * 1e3
    text = (
        f"On `configs/tiny.yaml`, whose step takes {milliseconds:.1f} ms on two ranks, all checks "
        f"make it {both - 1:+.1%} longer, those of batches alone {batches - 1:+.1%} "
        f"(`python benchmarks/guard_overhead.py`, medians of {arguments.pairs} pairs)."
    )
    print(text)
    if arguments.document is not None:
        write_into(arguments.document, "overhead", text)


if __name__ == "__main__":
    main()
