"""Trains a TorchRec model for some steps, on GPUs if each rank has one.

    torchrun --nproc-per-node 2 examples/minimal.py    (or alone: python examples/minimal.py)

Tables are fused in minimal.py, and TorchRec's own in minimal_stock.py: two imports differ.
"""

import os

import torch
import torch.distributed as dist
import torchrec
from fusedrec_torchrec import FusedShardingPlanner as Planner
from fusedrec_torchrec import fused_sharders as all_sharders

ROWS, DIM, BATCH = {"user": 20_000, "viewed": 50_000}, 16, 512  # rows of the tables
if "RANK" not in os.environ:  # alone
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
on_gpus = torch.cuda.device_count() >= int(os.environ.setdefault("LOCAL_WORLD_SIZE", "1"))
device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_gpus else "cpu")
torch.cuda.set_device(device if on_gpus else -1)  # -1 changes nothing
dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
torch.manual_seed(dist.get_rank())  # every rank has clicks of its own


class Clicks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        zeros = torch.nn.init.zeros_
        tables = [
            torchrec.EmbeddingBagConfig(rows, DIM, name, feature_names=[name], init_fn=zeros)
            for name, rows in ROWS.items()
        ]
        self.bags = torchrec.EmbeddingBagCollection(tables, device=torch.device("meta"))
        self.top = torch.nn.Linear(4 + DIM * len(ROWS), 1, device=device)

    def forward(self, dense: torch.Tensor, ids: torchrec.KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.bags(ids).to_dict()
        return self.top(torch.cat([dense, *(pooled[name] for name in ROWS)], dim=1)).squeeze(1)


net, sharders = Clicks(), all_sharders()
torchrec.optim.apply_optimizer_in_backward(torch.optim.Adagrad, net.bags.parameters(), {"lr": 0.1})
pooling = {"viewed": torchrec.distributed.planner.ParameterConstraints(pooling_factors=[2.0])}
plan = Planner(constraints=pooling).collective_plan(net, sharders)
model = torchrec.distributed.DistributedModelParallel(net, None, device, plan, sharders)
optimizer = torch.optim.Adam(net.top.parameters(), lr=0.01)
for step in range(41):
    user = (ROWS["user"] * torch.rand(BATCH) ** 4).long()  # some come often
    lengths = torch.cat([torch.ones_like(user), torch.randint(0, 5, (BATCH,))])
    viewed = torch.randint(0, ROWS["viewed"], (int(lengths[BATCH:].sum()),))
    ids = torchrec.KeyedJaggedTensor(list(ROWS), torch.cat([user, viewed]), lengths=lengths)
    logits = model(torch.rand(BATCH, 4).to(device), ids.to(device))
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, (user % 2.0).to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0 and step % 10 == 0:
        print(f"step {step:2}  loss {loss.item():.6f}")
dist.destroy_process_group()
