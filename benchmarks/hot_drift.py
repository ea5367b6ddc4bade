"""Does the hot set follow the data?  Hit rates with a fixed and with an adaptive hot set.

python benchmarks/hot_drift.py [--document docs/hot_rows_results.md]

Generated data whose popular rows change all at once, halfway, on two ranks.  Hit rate is the share
of the rows of a batch, each once, that are hot.  Draws docs/figures/hot_drift.png.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import mean

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from ranks import on_ranks, write_into
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import fusedrec_torchrec as fr
from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.profile import sample_profile
from fusedrec_torchrec.access.synthetic import SyntheticData, SyntheticTable

RANKS, BATCH, STEPS = 2, 1024, 600
TABLES, ROWS, HOT_ROWS, DIM = 8, 50_000, 8_000, 16
CHANGE = STEPS // 2
FAR = 1 << 30  # samples between the first and the second half: other rows are popular there
ADAPT = fr.AdaptOptions(every=32, sample=4, counters=1 << 16, decay=0.5, margin=1.25)
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "hot_drift.png"


def data(samples: int) -> SyntheticData:
    tables = [
        SyntheticTable(name=f"t{i}", rows=ROWS, zipf=1.05, drift=0.017 * (i + 1))
        for i in range(TABLES)
    ]
    return SyntheticData(tables, dense_features=1, samples=samples)


def build(hot: fr.HotOptions) -> DistributedModelParallel:
    module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{i}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"t{i}"]
            )
            for i in range(TABLES)
        ],
        device=torch.device("meta"),
    )
    sharder = fr.FusedEmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}, hot=hot
    )
    generators = {f"t{i}": fr.fused_row_wise() for i in range(TABLES)}
    plan = construct_module_sharding_plan(module, generators, sharder=sharder, device_type="cpu")
    group = dist.group.WORLD
    assert group is not None
    return DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )


def hit_rates(path: Path) -> dict[str, list[float]]:
    """Returns the hit rate of each step on this rank, beginning with a hot set."""
    rank, source = dist.get_rank(), data(FAR + STEPS * RANKS * BATCH)
    models = {
        "fixed": build(fr.HotOptions(hot_set=path)),
        "adaptive": build(fr.HotOptions(hot_set=path, adapt=ADAPT)),
    }
    hits: dict[str, list[float]] = {name: [] for name in models}
    for step in range(STEPS):
        start = (step * RANKS + rank) * BATCH + (FAR if step >= CHANGE else 0)
        batch = KeyedJaggedTensor(
            keys=[f"t{i}" for i in range(TABLES)],
            values=torch.from_numpy(source.read(start, start + BATCH).ids),
            lengths=torch.ones(TABLES * BATCH, dtype=torch.int32),
        )
        for name, model in models.items():
            used = model.module.fused.hot.used
            used.reset()
            model(batch).values().sum().backward()
            hits[name].append(used.hot / used.rows)
    return hits


def draw(fixed: list[float], adaptive: list[float]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(fixed, color="tab:gray", linewidth=1, label="fixed hot set")
    axes.plot(adaptive, color="tab:red", linewidth=1.2, label="adaptive hot set")
    axes.axvline(CHANGE, color="black", linestyle=":", label="other rows become popular")
    axes.set_xlabel("training step")
    axes.set_ylabel("hot rows / rows of a batch")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    figure.savefig(FIGURE, dpi=120)


def report(fixed: list[float], adaptive: list[float]) -> str:
    before = mean(adaptive[CHANGE - 100 : CHANGE])
    after = adaptive[CHANGE:]
    recovered = next(
        (i for i in range(len(after) - 8) if mean(after[i : i + 8]) >= 0.95 * before), None
    )
    text = "never" if recovered is None else f"{recovered} steps"
    return "\n".join(
        [
            "| | fixed hot set | adaptive hot set |",
            "|---|---|---|",
            f"| hit rate, 100 steps before the change | {mean(fixed[CHANGE - 100 : CHANGE]):.1%} "
            f"| {before:.1%} |",
            f"| first 16 steps after it | {mean(fixed[CHANGE : CHANGE + 16]):.1%} "
            f"| {mean(after[:16]):.1%} |",
            f"| last 100 steps | {mean(fixed[-100:]):.1%} | {mean(after[-100:]):.1%} |",
            f"| 95 % of the hit rate before the change are back after | never | {text} |",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--document", type=Path, help="document to write the table into")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path, first = Path(name) / "hot_set.npz", data(CHANGE * RANKS * BATCH)
        HotSet.most_used(sample_profile(first, 0.05, 1 << 20), HOT_ROWS).save(path)
        hits = on_ranks(RANKS, hit_rates, path)
    draw(**hits)
    text = report(**hits)
    print(text)
    if arguments.document is not None:
        write_into(arguments.document, "drift", text)


if __name__ == "__main__":
    main()
