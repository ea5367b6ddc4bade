"""What does less on the wire cost in quality?  Trains the same model on Criteo data, and counts.

    python benchmarks/compression_quality.py train.txt.gz [--document docs/compression_results.md]

All runs start from the same weights and see the same samples in the same order, for several seeds;
what differs is how rows, their gradients and the dense part's gradients travel.  Bytes are counted
in a step of each run.  How far training carries a difference in the last bit is shown by a
control, stock table_wise.  With --document the tables go between the markers of a document.
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
from fusedrec_torchrec.training.logs import read_log
from fusedrec_torchrec.training.loop import Training
from fusedrec_torchrec.training.source import open_source

CONFIG = "configs/criteo_kaggle.yaml"
RANKS = 2
BATCH = 1024
PLAIN = "fp32"
CONTROL = "fp32, table_wise"


def rows(forward: str, backward: str) -> list[str]:
    return [f"sharding.exchange.codecs={{forward: {forward}, backward: {backward}}}"]


def dct(density: float, relative: str = "true") -> list[str]:
    forward = f"{{type: dct, density: {density}, values: bf16, relative: {relative}}}"
    return rows(forward, "{type: bf16}")


def dense(density: float, more: str = "") -> list[str]:
    return [f"sharding.dense_gradients={{density: {density}{more}}}"]


# Settings of each system, on top of what all have in common.
ROWS: dict[str, list[str]] = {
    PLAIN: [],
    CONTROL: ["sharding.type=table_wise"],
    "fp16": rows("{type: fp16}", "{type: fp16}"),
    "bf16": rows("{type: bf16}", "{type: bf16}"),
    "int8": rows("{type: int8}", "{type: int8}"),
    "int8, gradients bf16": rows("{type: int8}", "{type: bf16}"),
    "dct 0.05, bf16": dct(0.05),
    "dct 0.25, bf16": dct(0.25),
    "dct 0.5, bf16": dct(0.5),
    "dct 0.75, bf16": dct(0.75),
    "dct 0.05, bf16, not relative": dct(0.05, "false"),
    "dct 0.5, bf16, not relative": dct(0.5, "false"),
}
DENSE: dict[str, list[str]] = {
    PLAIN: [],
    CONTROL: ["sharding.type=table_wise"],
    "0.05": dense(0.05),
    "0.009": dense(0.009),
    "0.009, renewed every 1000 steps": dense(0.009, ", every: 1000"),
    "0.009, no error feedback": dense(0.009, ", error_feedback: false"),
    "0.002": dense(0.002),
}
SYSTEMS = {("rows", name): settings for name, settings in ROWS.items()} | {
    ("dense gradients", name): settings
    for name, settings in DENSE.items()
    if name not in (PLAIN, CONTROL)
}

Run = tuple[str, str, int]  # what is compressed, system, seed


def train(folder: Path, run: Run, epochs: int) -> dict[str, float]:
    """Trains one run on this rank; returns its evaluation, and the bytes of a step."""
    what, system, seed = run
    return trained(folder, SYSTEMS[what, system], seed, epochs, BATCH)


def trained(folder: Path, more: list[str], seed: int, epochs: int, batch: int) -> dict[str, float]:
    """Trains on this rank; returns the evaluation, and the bytes of a step.

    Args:
        folder: has the prepared data.
        more: settings of the run, on top of what all have in common.
        seed: of weights and order of samples.
        epochs: passes over the data.
        batch: samples of a step, of all ranks together.
    """
    log = folder / "run"
    settings = [
        f"data.criteo={{prepared: {folder / 'prepared'}}}",
        *(f"data.batch_size={batch}", "data.workers=0", f"data.seed={seed}", f"seed={seed}"),
        *(f"epochs={epochs}", "eval_every=0", "checkpoint.every=0"),
        *(f"logging.directory={log}", "logging.tensorboard=false", "logging.plots=false"),
        "bad_batches.gradients=false",  # its collective would be counted
        *more,
    ]
    config = load_config(CONFIG, settings)
    training = Training(config, open_source(config), torch.device("cpu"), None)
    result = training.run()
    record = next(r for r in read_log(log) if r["kind"] == "train" and "bytes_sent_per_step" in r)
    sent = {name: record.get(f"{name}_bytes_per_step", 0.0) for name in COLLECTIVES}
    return {"steps": float(training.steps), **result, **sent}


COLLECTIVES = ("all_to_all", "all_reduce", "all_gather")


def table(results: dict[Run, dict[str, float]], what: str, seeds: int) -> str:
    """Returns the results in Markdown."""
    every = ROWS if what == "rows" else DENSE
    systems = [s for s in every if {(what, s, 0), ("rows", s, 0)} & results.keys()]

    def of(system: str, seed: int) -> dict[str, float]:
        return results.get((what, system, seed)) or results["rows", system, seed]

    def sent(system: str) -> float:
        measured = of(system, 0)
        if what == "rows":
            return measured["all_to_all"]
        return measured["all_reduce"] + measured["all_gather"]

    bytes_of = "all-to-alls (ids included)" if what == "rows" else "the dense part"
    steps = of(PLAIN, 0)["steps"]
    lines = [
        f"After {steps:.0f} steps of {BATCH} samples, mean ± standard deviation over {seeds} "
        f"seeds, and the differences to `{PLAIN}` with the same seed; bytes of {bytes_of} that a "
        "rank sends in a step:",
        "",
        "| | bytes | fewer | AUC | log loss | AUC, mean difference | largest |",
        "|---|---|---|---|---|---|---|",
    ]
    for system in systems:
        auc, loss = ([of(system, s)[name] for s in range(seeds)] for name in ("auc", "log_loss"))
        apart = [auc[s] - of(PLAIN, s)["auc"] for s in range(seeds)]
        fewer = "" if system == CONTROL else f"{sent(PLAIN) / sent(system):.1f}x"
        cells = [f"{sent(system):,.0f}", fewer]
        cells += [f"{mean(values):.5f} ± {stdev(values):.5f}" for values in (auc, loss)]
        cells += [f"{mean(apart):+.5f}", f"{max(map(abs, apart)):.5f}"]
        lines.append(f"| {system} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="a text file in Criteo's format")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--only",
        action="append",
        choices=[name for _, name in SYSTEMS],
        help=f"runs this system and {PLAIN}; may be given several times",
    )
    parser.add_argument("--document", type=Path, help="document to write the tables into")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("--seeds must be at least 2, for a spread")
    if arguments.only and arguments.document:
        parser.error("--only and --document are both given: a document has all systems")
    chosen = [s for s in SYSTEMS if not arguments.only or s[1] in (PLAIN, *arguments.only)]
    runs = [(*system, seed) for seed in range(arguments.seeds) for system in chosen]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = PrepareOptions(min_count=3, on_bad_line="skip")
        try:
            prepare([arguments.data], folder / "prepared", options)
        except ValueError as error:
            parser.error(str(error))
        values = on_ranks(RANKS, one_by_one, train, folder, runs, arguments.epochs)
    results = dict(zip(runs, values, strict=True))
    for what, marker in (("rows", "row quality"), ("dense gradients", "dense quality")):
        text = table(results, what, arguments.seeds)
        print(f"{what}\n{text}\n")
        if arguments.document is not None:
            write_into(arguments.document, marker, text)


if __name__ == "__main__":
    main()
