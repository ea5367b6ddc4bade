"""Trains a small DLRM on generated clicks with the fused sharder; see the README.

torchrun --nproc-per-node 2 examples/dlrm/demo.py
"""

import argparse
import logging
import time
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from click_data import ClickData
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchmetrics.classification import BinaryAUROC
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from tqdm import tqdm

import fusedrec_torchrec as fr
from fusedrec_torchrec.collectives import CollectiveCounter

TABLE_ROWS = (10, 100, 500, 1_000, 5_000, 20_000, 50_000, 100_000)
DIM = 16
DENSE_FEATURES = 8


def build(data: ClickData, device: torch.device) -> DistributedModelParallel:
    group = dist.group.WORLD
    assert group is not None
    model = DLRMTrain(
        DLRM(
            embedding_bag_collection=EmbeddingBagCollection(
                tables=[
                    EmbeddingBagConfig(
                        name=f"table_{i}",
                        num_embeddings=rows,
                        embedding_dim=DIM,
                        feature_names=[feature],
                    )
                    for i, (rows, feature) in enumerate(
                        zip(data.table_rows, data.features, strict=True)
                    )
                ],
                device=torch.device("meta"),
            ),
            dense_in_features=data.dense_features,
            dense_arch_layer_sizes=[32, DIM],
            over_arch_layer_sizes=[64, 32, 1],
            dense_device=device,
        )
    )
    sharders = fr.fused_sharders(
        fused_params={
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": 0.1,
            "eps": 1e-6,
        }
    )
    topology = Topology(
        world_size=dist.get_world_size(),
        local_world_size=dist.get_world_size(),
        compute_device=device.type,
    )
    planner = fr.FusedShardingPlanner(
        topology=topology, batch_size=data.batch_size // dist.get_world_size()
    )
    plan = planner.collective_plan(model, sharders, group)
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(group),
        plan=plan,
        sharders=sharders,
        device=device,
    )


def batches(data: ClickData, steps: range) -> Iterator[Batch]:
    for step in steps:
        yield data.batch(step, dist.get_rank(), dist.get_world_size())


def evaluate(model: torch.nn.Module, data: ClickData, steps: range) -> tuple[float, float]:
    """Mean loss and AUC of all ranks on batches the model has not seen."""
    auc, losses = BinaryAUROC(), []
    with torch.no_grad():
        for batch in batches(data, steps):
            loss, (_, logits, labels) = model(batch)
            losses.append(loss)
            auc.update(torch.sigmoid(logits), labels.int())
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size(), float(auc.compute())  # AUC gathers over ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=2048, help="samples of all ranks")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.steps < 20:
        parser.error("--steps must be at least 20")

    device = torch.device("cpu")
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torchrec")
    dist.init_process_group("gloo")
    data = ClickData(
        table_rows=TABLE_ROWS,
        dense_features=DENSE_FEATURES,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
    )
    model = build(data, device)
    first = dist.get_rank() == 0
    if first:
        for name, sharding in next(iter(model.plan.plan.values())).items():
            print(f"{name}: {sharding.sharding_type}")
    optimizer = CombinedOptimizer(
        [
            model.fused_optimizer,
            KeyedOptimizerWrapper(
                dict(in_backward_optimizer_filter(model.named_parameters())),
                lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
            ),
        ]
    )
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    stream = batches(data, range(arguments.steps + 10))
    start = time.perf_counter()
    with tqdm(total=arguments.steps, unit="step", disable=not first) as progress:
        for _ in range(arguments.steps):
            loss, _, _ = pipeline.progress(stream)
            progress.update()
            progress.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
    seconds = time.perf_counter() - start
    counted = 5
    with CollectiveCounter() as counter:
        for _ in range(counted):
            pipeline.progress(stream)
    pipeline.detach()
    model.eval()
    loss, auc = evaluate(model, data, range(10**6, 10**6 + 20))

    def per_step(name: str) -> str:
        number = sum(c.name == name for c in counter.collectives) / counted
        return f"{number:g} with {counter.bytes_sent(name) / counted / 1024:.1f} KiB sent"

    if first:
        print(f"loss on held-out clicks  {loss:.4f}")
        print(f"AUC on held-out clicks   {auc:.4f}")
        print(f"samples/s                {arguments.steps * arguments.batch_size / seconds:.0f}")
        print(f"all-to-alls per step     {per_step('all_to_all')} per rank (embeddings)")
        print(f"all-reduces per step     {per_step('all_reduce')} per rank (dense gradients)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
