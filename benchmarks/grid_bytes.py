"""What 2D parallelism sends: the exchange within groups, and the syncs between them.

python benchmarks/grid_bytes.py train.txt.gz [--document docs/2d.md]

Four ranks, as one group (1D) and as two groups of two, on the batches of Criteo data.  Bytes are
counted, not estimated; nothing is timed.  Whole shards are what TorchRec's DMPCollection syncs.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from fusedrec_torchrec.core.collective_counter import CollectiveCounter
from fusedrec_torchrec.core.terminal import human_bytes
from fusedrec_torchrec.training.data.prepare import prepare
from fusedrec_torchrec.training.data.prepare_options import PrepareOptions
from fusedrec_torchrec.training.data.prepared import PreparedData

RANKS, BATCH, DIM, STEPS, WARM_UP = 4, 2048, 64, 16, 2
SYSTEMS: dict[str, fr.GridOptions | None] = {
    "1D": None,
    "2D, gradients shared": fr.GridOptions(sharding_group_size=2, sync="gradients"),
}
for every in (1, 4, 16):
    averaged = fr.GridOptions(sharding_group_size=2, sync_every=every)
    SYSTEMS[f"2D, touched rows averaged every {every}"] = averaged
    SYSTEMS[f"2D, whole shards averaged every {every}"] = replace(averaged, rows="all")


def build(data: PreparedData, grid: fr.GridOptions | None) -> DistributedModelParallel:
    module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name]
            )
            for name, rows in data.table_rows.items()
        ],
        device=torch.device("meta"),
    )
    sharders = fr.fused_sharders({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})
    sharder: Any = sharders[0]
    ranks = RANKS if grid is None else grid.sharding_group_size
    plan = ShardingPlan(
        {
            "": construct_module_sharding_plan(
                module,
                {name: fr.fused_row_wise() for name in data.table_rows},
                sharder=sharder,
                local_size=ranks,
                world_size=ranks,
                device_type="cpu",
            )
        }
    )
    if grid is not None:
        return fr.GridModelParallel(module, grid, plan=plan, sharders=sharders)
    group = dist.group.WORLD
    assert group is not None
    return DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=plan,
        sharders=sharders,
    )


def count(folder: Path) -> list[tuple[str, float, float, float]]:
    """Returns for each system the bytes of a step, those of its sync, and its collectives."""
    data = PreparedData.open(folder)
    names = list(data.table_rows)
    results = []
    for system, grid in SYSTEMS.items():
        model = build(data, grid)
        sent, synced, collectives = 0.0, 0.0, 0
        for step in range(WARM_UP + STEPS):
            start = (step * RANKS + dist.get_rank()) * BATCH % (data.samples - BATCH)
            batch = KeyedJaggedTensor(
                keys=names,
                values=torch.from_numpy(data.read(start, start + BATCH).ids),
                lengths=torch.ones(len(names) * BATCH, dtype=torch.int32),
            )
            if step == WARM_UP and isinstance(model, fr.GridModelParallel):
                model.sync_now()
            with CollectiveCounter() as forward:
                model(batch).values().sum().backward()
            with CollectiveCounter() as after:
                if isinstance(model, fr.GridModelParallel):
                    model.sync()
            if step >= WARM_UP:
                sent += forward.bytes_sent() / STEPS
                synced += after.bytes_sent() / STEPS
                collectives += len(forward.collectives) + len(after.collectives)
        values = torch.tensor([sent, synced], dtype=torch.float64)
        dist.all_reduce(values)
        results.append((system, *(values / RANKS).tolist(), collectives / STEPS))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="a text file in Criteo's format")
    parser.add_argument("--document", type=Path, help="document to write the table into")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "prepared"
        try:
            prepare([arguments.data], folder, PrepareOptions(on_bad_line="skip"))
        except ValueError as error:
            parser.error(str(error))
        results = on_ranks(RANKS, count, folder)
    lines = ["| | forward and backward | sync | collectives |", "|---|---|---|---|"]
    for system, sent, synced, collectives in results:
        lines.append(
            f"| {system} | {human_bytes(sent)} | {human_bytes(synced)} | {collectives:.2f} |"
        )
    text = "\n".join(lines)
    print(text)
    if arguments.document is not None:
        write_into(arguments.document, "bytes", text)


if __name__ == "__main__":
    main()
