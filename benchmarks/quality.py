"""Does the sharding change what is learned?  Trains the same model three ways on Criteo data.

python benchmarks/quality.py train.txt.gz [--document docs/quality.md]

The same samples in the same order, the same initial weights, the same steps, on 2 ranks, with
stock table_wise, stock row_wise and fused_row_wise, for several seeds.  What differs is the order
of sums, so the last bit.  How far training carries a last bit is shown by two controls: table_wise
from initial weights whose last bit was changed at random.  With --document the tables go between
the markers of a document.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import mean, stdev

import torch
import torch.distributed as dist
from ranks import on_ranks, one_by_one, write_into

from fusedrec_torchrec.training.arguments import load_config
from fusedrec_torchrec.training.data.prepare import prepare
from fusedrec_torchrec.training.data.prepare_options import PrepareOptions
from fusedrec_torchrec.training.loop import Training
from fusedrec_torchrec.training.source import open_source

CONFIG = "configs/criteo_kaggle.yaml"
RANKS = 2
CONTROLS = ("table_wise, last bit changed", "table_wise, last bit changed otherwise")
SYSTEMS = ("table_wise", "row_wise", "fused_row_wise", *CONTROLS)
OPTIMIZERS = {
    "SGD for the dense part": "{type: sgd, learning_rate: 0.1}",
    "Adam for the dense part, as in configs/criteo_kaggle.yaml": "{type: adam}",
}
QUALITY = ("auc", "log_loss", "normalized_entropy")

Run = tuple[str, str, int]  # optimizer, system, seed
Results = dict[Run, dict[str, float]]


def train(folder: Path, run: Run, epochs: int) -> dict[str, float]:
    """Trains one run on this rank; returns its evaluation."""
    optimizer, system, seed = run
    settings = {
        "data.criteo": f"{{prepared: {folder / 'prepared'}}}",
        "data.batch_size": 1024,
        "data.workers": 0,
        "data.seed": seed,
        "seed": seed,
        "epochs": epochs,
        "eval_every": 0,
        "checkpoint.every": 0,
        "sharding.type": "table_wise" if system in CONTROLS else system,
        "optimizer.dense": OPTIMIZERS[optimizer],
        "logging.directory": folder / "run",
        "logging.tensorboard": "false",
    }
    config = load_config(CONFIG, [f"{key}={value}" for key, value in settings.items()])
    training = Training(config, open_source(config), torch.device("cpu"), None)
    if system in CONTROLS:
        change_last_bit(training.model, 1000 * CONTROLS.index(system) + 2 * seed + dist.get_rank())
    return {**training.run(), "steps": float(training.steps)}


@torch.no_grad()
def change_last_bit(model: torch.nn.Module, seed: int) -> None:
    """Adds or subtracts one unit in the last place, about, of each embedding weight."""
    generator = torch.Generator().manual_seed(seed)
    for key, value in model.state_dict().items():
        if ".embedding_bags." in key:
            for shard in value.local_shards():
                signs = torch.randint(0, 2, shard.tensor.shape, generator=generator) * 2 - 1
                shard.tensor.mul_(1 + signs * 2.0**-23)


def tables(results: Results, optimizer: str, seeds: int) -> list[str]:
    """Returns the results of one optimizer in Markdown."""
    steps = results[optimizer, SYSTEMS[0], 0]["steps"]
    lines = [
        f"### {optimizer}",
        "",
        f"After {steps:.0f} steps of 1024 samples, mean ± standard deviation over {seeds} seeds:",
        "",
        "| system | AUC | log loss | normalized entropy |",
        "|---|---|---|---|",
    ]
    for system in SYSTEMS:
        cells = []
        for name in QUALITY:
            values = [results[optimizer, system, seed][name] for seed in range(seeds)]
            cells.append(f"{mean(values):.6f} ± {stdev(values):.6f}")
        lines.append(f"| {system} | {' | '.join(cells)} |")
    lines += ["", "Largest difference to table_wise with the same seed:", ""]
    lines += ["| system | AUC | log loss |", "|---|---|---|"]
    for system in SYSTEMS[1:]:
        cells = []
        for name in QUALITY[:2]:
            apart = [
                abs(results[optimizer, system, s][name] - results[optimizer, "table_wise", s][name])
                for s in range(seeds)
            ]
            cells.append(f"{max(apart):.1e}")
        lines.append(f"| {system} | {' | '.join(cells)} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="a text file in Criteo's format")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--document", type=Path, help="document to write the tables into")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds must be at least 2, for a spread")
    runs = [
        (optimizer, system, seed)
        for optimizer in OPTIMIZERS
        for seed in range(arguments.seeds)
        for system in SYSTEMS
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = PrepareOptions(min_count=3, on_bad_line="skip")
        try:
            prepare([arguments.data], folder / "prepared", options)
        except ValueError as error:
            parser.error(str(error))
        values = on_ranks(RANKS, one_by_one, train, folder, runs, arguments.epochs)
    results: Results = dict(zip(runs, values, strict=True))
    lines = [line for name in OPTIMIZERS for line in tables(results, name, arguments.seeds)]
    text = "\n".join(lines)
    print(text)
    if arguments.document is not None:
        write_into(arguments.document, "results", text.rstrip())


if __name__ == "__main__":
    main()
