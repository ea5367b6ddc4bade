"""How long does the planner take?

python benchmarks/plan_scale.py [--document docs/cost_model.md]
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from ranks import write_into
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import fusedrec_torchrec as fr
from fusedrec_torchrec.bench.report import Table
from fusedrec_torchrec.planner.cost.cluster import ClusterConfig
from fusedrec_torchrec.planner.search.search_config import GroupsConfig, SearchConfig


def table(tables: int, ranks: int) -> Table:
    """Measures the seconds of planning, and returns them as a table."""
    random = np.random.default_rng(0)
    model = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t{t}",
                num_embeddings=int(10 ** random.uniform(2, 7)),
                embedding_dim=int(random.choice([16, 64, 128])),
                feature_names=[f"t{t}"],
            )
            for t in range(tables)
        ],
        device=torch.device("meta"),
    )
    cluster = ClusterConfig(ranks=ranks, ranks_per_node=min(8, ranks))
    rows: list[tuple[str, ...]] = []
    for name, groups in (("one group", GroupsConfig()), ("all groups", GroupsConfig(sizes="all"))):
        zipf = {f"t{t}": float(random.choice([0.0, 0.8, 1.1])) for t in range(tables)}
        planner = fr.FusedShardingPlanner(
            batch_size=512, cluster=cluster, search=SearchConfig(groups=groups), zipf=zipf
        )
        begun = time.perf_counter()
        plan = planner.plan(model, fr.fused_sharders())
        seconds = time.perf_counter() - begun
        (module,) = plan.plan.values()
        shards = sum(len(t.sharding_spec.shards) for t in module.values())
        rows.append((name, f"{seconds:.1f}", f"{shards:,}"))
    return Table("", (f"{tables} tables, {ranks} ranks", "seconds", "shards in the plan"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--document", type=Path, default=None, help="where to write the table")
    arguments = parser.parse_args()
    text = table(arguments.tables, arguments.ranks).markdown()
    print(text)
    if arguments.document is not None:
        write_into(arguments.document, "scale", text)


if __name__ == "__main__":
    main()
