"""Do hot rows and hot batches change what is learned?  Trains the same model on Criteo data.

python benchmarks/hot_quality.py train.txt.gz [--document docs/hot_rows_results.md]

All runs start from the same weights, for several seeds: samples shuffled, without hot rows; in
another shuffled order, which shows how much the order alone matters; with hot rows, synced every
step and every 8 steps; with FAE's hot and cold batches, formed as the data comes and from data that
was separated before, with a fixed and with an adaptive rate.  With --document the table goes
between the markers of a document.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import mean, stdev

import torch
from ranks import on_ranks, one_by_one, write_into

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.profile import sample_profile
from fusedrec_torchrec.training.arguments import load_config
from fusedrec_torchrec.training.data.prepare import prepare
from fusedrec_torchrec.training.data.prepare_options import PrepareOptions
from fusedrec_torchrec.training.data.separate import separate
from fusedrec_torchrec.training.loop import Training
from fusedrec_torchrec.training.source import open_source

CONFIG = "configs/criteo_kaggle.yaml"
RANKS = 2
HELD_OUT = 0.142857
BATCH = 1024
PLAIN = "shuffled"
STREAM = "data.hot_batches.order=stream"
SEPARATED = "data.hot_batches.order=separated"
HOT = "sharding.hot.hot_set={hot_set}"
# Settings of each system, on top of what all have in common.
SYSTEMS: dict[str, list[str]] = {
    PLAIN: [],
    "shuffled, another order": ["data.seed={other_seed}"],
    "hot rows": [HOT],
    "hot rows, synced every 8 steps": [HOT, "sharding.hot.sync_every=8"],
    "hot batches, stream, rate 0.5": [HOT, STREAM],
    "hot batches, stream, rate 0.1": [HOT, STREAM, "data.hot_batches.rate=0.1"],
    "hot batches, separated, rate 0.5": [HOT, SEPARATED],
    "hot batches, separated, rate 0.02": [HOT, SEPARATED, "data.hot_batches.rate=0.02"],
    "hot batches, separated, adaptive": [HOT, SEPARATED, "data.hot_batches.adaptive=true"],
    "hot batches, stream, synced every 8 steps": [HOT, STREAM, "sharding.hot.sync_every=8"],
}

Run = tuple[str, int]  # system, seed


def train(folder: Path, run: Run, epochs: int) -> dict[str, float]:
    """Trains one run on this rank; returns its evaluation."""
    system, seed = run
    settings = [
        f"data.criteo={{prepared: {folder / 'prepared'}}}",
        f"data.batch_size={BATCH}",
        f"data.held_out={HELD_OUT}",
        "data.workers=0",
        f"data.seed={seed}",
        f"seed={seed}",
        f"epochs={epochs}",
        "eval_every=20",
        "checkpoint.every=0",
        f"logging.directory={folder / 'run'}",
        "logging.tensorboard=false",
        "logging.plots=false",
    ]
    values = {"hot_set": folder / "hot_set.npz", "other_seed": seed + 1000}
    settings += [setting.format(**values) for setting in SYSTEMS[system]]
    if any("order=" in setting for setting in settings):
        settings.append("sharding.hot.hot_batches=true")
    if SEPARATED in settings:
        settings.append(f"data.criteo={{prepared: {folder / 'separated'}}}")
    config = load_config(CONFIG, settings)
    training = Training(config, open_source(config), torch.device("cpu"), None)
    result = training.run()
    return {"steps": float(training.steps), **result}


def table(results: dict[Run, dict[str, float]], seeds: int, about: str) -> str:
    """Returns the results in Markdown."""
    steps = results[PLAIN, 0]["steps"]
    lines = [
        f"{about}  After {steps:.0f} steps of {BATCH} samples, mean ± standard deviation over "
        f"{seeds} seeds, and the mean and the largest difference to `{PLAIN}` with the same seed:",
        "",
        "| | AUC | log loss | AUC, mean difference | largest |",
        "|---|---|---|---|---|",
    ]
    for system in SYSTEMS:
        auc, loss = (
            [results[system, seed][name] for seed in range(seeds)] for name in ("auc", "log_loss")
        )
        apart = [auc[seed] - results[PLAIN, seed]["auc"] for seed in range(seeds)]
        cells = [f"{mean(values):.5f} ± {stdev(values):.5f}" for values in (auc, loss)]
        cells += [f"{mean(apart):+.5f}", f"{max(map(abs, apart)):.5f}"]
        lines.append(f"| {system} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="a text file in Criteo's format")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--hot-rows", type=int, default=5000)
    parser.add_argument("--document", type=Path, help="document to write the table into")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds must be at least 2, for a spread")
    runs = [(system, seed) for seed in range(arguments.seeds) for system in SYSTEMS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = PrepareOptions(min_count=3, on_bad_line="skip")
        try:
            data = prepare([arguments.data], folder / "prepared", options)
        except ValueError as error:
            parser.error(str(error))
        hot_set = HotSet.most_used(sample_profile(data, 0.05, 1 << 20), arguments.hot_rows)
        hot_set.save(folder / "hot_set.npz")
        separated = separate(data, hot_set, folder / "separated", HELD_OUT)
        assert separated.hot_samples is not None
        train_samples = data.samples - round(data.samples * HELD_OUT)
        share = separated.hot_samples[0] / train_samples
        about = (
            f"{hot_set.rows} hot rows of {sum(data.table_rows.values())}, picked by 5 % of the "
            f"samples; {share:.1%} of the training samples need no others."
        )
        values = on_ranks(RANKS, one_by_one, train, folder, runs, arguments.epochs)
    text = table(dict(zip(runs, values, strict=True)), arguments.seeds, about)
    print(text)
    if arguments.document is not None:
        write_into(arguments.document, "quality", text)


if __name__ == "__main__":
    main()
