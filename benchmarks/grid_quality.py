"""Does 2D parallelism change what is learned, and does momentum scaling mend it?

python benchmarks/grid_quality.py train.txt.gz [--document docs/2d.md]

Trains the same model on four ranks, for several seeds, on Criteo data and on generated data: as
one group (1D); as two groups of two that share gradients; and as two groups that are averaged every
1, 4 and 16 steps, with row-wise AdaGrad and with momentum-scaled row-wise AdaGrad.  The same
samples in the same order, from the same weights.  Draws docs/figures/grid_quality.png.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import mean, stdev

import torch
from ranks import on_ranks, one_by_one, write_into

from fusedrec_torchrec.training.arguments import load_config
from fusedrec_torchrec.training.data.prepare import prepare
from fusedrec_torchrec.training.data.prepare_options import PrepareOptions
from fusedrec_torchrec.training.loop import Training
from fusedrec_torchrec.training.source import open_source

RANKS, BATCH = 4, 1024
PLAIN, SHARED = "1D", "2D, gradients shared"
EVERY = (1, 4, 16)
GRID = "sharding.grid.sharding_group_size=2"
SCALED = "optimizer.embedding.type=momentum_scaled_rowwise_adagrad"


def averaged(every: int, scaled: bool) -> str:
    return f"2D, averaged every {every}" + (", momentum-scaled" if scaled else "")


SYSTEMS: dict[str, list[str]] = {
    PLAIN: [],
    SHARED: [GRID, "sharding.grid.sync=gradients"],
    **{
        averaged(every, scaled): [
            GRID,
            f"sharding.grid.sync_every={every}",
            *([SCALED] if scaled else []),
        ]
        for scaled in (False, True)
        for every in EVERY
    },
    "2D, averaged every 1, momentum scale 4": [
        GRID,
        SCALED,
        "optimizer.embedding.momentum_scale=4",
    ],
}
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "grid_quality.png"

Run = tuple[str, str, int]  # data, system, seed
Results = dict[Run, dict[str, float]]


def train(folder: Path, run: Run, epochs: int) -> dict[str, float]:
    """Trains one run on this rank; returns its evaluation."""
    data, system, seed = run
    settings = [
        f"data.batch_size={BATCH}",
        "data.workers=0",
        f"data.seed={seed}",
        f"seed={seed}",
        "eval_every=0",
        "checkpoint.every=0",
        f"logging.directory={folder / 'run'}",
        "logging.tensorboard=false",
        "logging.plots=false",
        *SYSTEMS[system],
    ]
    if data == "Criteo":
        settings += [f"data.criteo={{prepared: {folder / 'prepared'}}}", f"epochs={epochs}"]
        config = load_config("configs/criteo_kaggle.yaml", settings)
    else:
        settings += ["data.synthetic.samples=260000", "steps=null", f"epochs={epochs}"]
        config = load_config("configs/tiny.yaml", settings)
    training = Training(config, open_source(config), torch.device("cpu"), None)
    result = training.run()
    return {"steps": float(training.steps), **result}


def table(results: Results, data: str, seeds: int) -> str:
    """Returns the results on one data set in Markdown."""
    steps = results[data, PLAIN, 0]["steps"]
    lines = [
        f"**{data} data**, {steps:.0f} steps of {BATCH} samples, mean ± standard deviation over "
        f"{seeds} seeds; differences to {PLAIN} with the same seed:",
        "",
        "| | AUC | log loss | AUC, mean difference | log loss, mean difference |",
        "|---|---|---|---|---|",
    ]
    for system in SYSTEMS:
        cells, apart = [], []
        for name in ("auc", "log_loss"):
            values = [results[data, system, seed][name] for seed in range(seeds)]
            cells.append(f"{mean(values):.5f} ± {stdev(values):.5f}")
            plain = (results[data, PLAIN, seed][name] for seed in range(seeds))
            apart.append(f"{mean(v - p for v, p in zip(values, plain, strict=True)):+.5f}")
        lines.append(f"| {system} | {' | '.join(cells + apart)} |")
    return "\n".join(lines)


def draw(results: Results, seeds: int) -> None:
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(data for data, _, _ in results))
    figure = Figure(figsize=(5 * len(names), 3.6), layout="constrained")
    for axes, data in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):

        def losses(system: str, data: str = data) -> list[float]:
            return [results[data, system, seed]["log_loss"] for seed in range(seeds)]

        axes.axhline(mean(losses(PLAIN)), color="black", label="1D")
        axes.axhspan(min(losses(PLAIN)), max(losses(PLAIN)), color="black", alpha=0.1)
        for scaled, label, color in (
            (False, "2D, row-wise AdaGrad", "tab:gray"),
            (True, "2D, momentum-scaled", "tab:red"),
        ):
            values = [losses(averaged(every, scaled)) for every in EVERY]
            middle = [mean(v) for v in values]
            spread = [[m - min(v) for m, v in zip(middle, values, strict=True)]]
            spread.append([max(v) - m for m, v in zip(middle, values, strict=True)])
            axes.errorbar(EVERY, middle, spread, marker="o", capsize=3, color=color, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(EVERY, [str(every) for every in EVERY])
        axes.set_xlabel("steps from one average to the next")
        axes.set_ylabel("log loss, held-out samples")
        axes.set_title(f"{data} data")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(FIGURE, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="a text file in Criteo's format")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--document", type=Path, help="document to write the tables into")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds must be at least 2, for a spread")
    names = ("Criteo", "Generated")
    runs = [
        (data, system, seed)
        for data in names
        for seed in range(arguments.seeds)
        for system in SYSTEMS
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            prepare(
                [arguments.data],
                folder / "prepared",
                PrepareOptions(min_count=3, on_bad_line="skip"),
            )
        except ValueError as error:
            parser.error(str(error))
        values = on_ranks(RANKS, one_by_one, train, folder, runs, arguments.epochs)
    results: Results = dict(zip(runs, values, strict=True))
    text = "\n\n".join(table(results, data, arguments.seeds) for data in names)
    print(text)
    draw(results, arguments.seeds)
    if arguments.document is not None:
        write_into(arguments.document, "quality", text)


if __name__ == "__main__":
    main()
