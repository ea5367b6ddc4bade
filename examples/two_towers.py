"""Retrieval with two towers: which items will a user click next, of all that there are?

    python examples/two_towers.py
    torchrun --nproc-per-node 2 examples/two_towers.py --steps 500 --k 20

One tower makes a vector of a user and of what the user has viewed, the other one of an item; their
product says how well they go together.  The tables of users and items are an
EmbeddingBagCollection, the views, a sequence, an EmbeddingCollection; both are fused.  The other
items of a batch are what was not clicked.  Clicks are generated: each user likes two categories.
"""

import argparse
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fusedrec_torchrec import FusedShardingPlanner, fused_sharders
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints

USERS, ITEMS, CATEGORIES = 5000, 2000, 50
MOST_VIEWS = 20
DIM = 32
HELD_OUT = 2000  # clicks of each rank


@dataclass
class Clicks:
    """Some clicks.

    Attributes:
        queries: user and views, what is known before the click.
        items: that were clicked.
    """

    queries: KeyedJaggedTensor
    items: torch.Tensor


class Shop:
    """Generates clicks: each user likes two categories, and in each some items are popular."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(0)  # the same shop on all ranks
        self._likes = torch.randint(CATEGORIES, (USERS, 2), generator=generator)
        self._popularity = 1 / torch.arange(1, ITEMS // CATEGORIES + 1) ** 0.8
        self._generator = torch.Generator().manual_seed(seed)

    def clicks(self, count: int) -> Clicks:
        """Returns clicks that have not been seen before."""
        users = torch.randint(USERS, (count,), generator=self._generator)
        lengths = torch.randint(MOST_VIEWS + 1, (count,), generator=self._generator)
        views = self._liked(users.repeat_interleave(lengths))
        queries = KeyedJaggedTensor(
            keys=["user", "views"],
            values=torch.cat([users, views]),
            lengths=torch.cat([torch.ones_like(users), lengths]),
        )
        return Clicks(queries, self._liked(users))

    def _liked(self, users: torch.Tensor) -> torch.Tensor:
        """Returns an item for each of the users."""
        which = torch.randint(2, (len(users),), generator=self._generator)
        place = self._popularity.multinomial(len(users), True, generator=self._generator)
        return place * CATEGORIES + self._likes[users, which]


def item_features(items: torch.Tensor) -> KeyedJaggedTensor:
    """Returns the features of items."""
    values = torch.cat([items, items % CATEGORIES])
    return KeyedJaggedTensor(["item", "category"], values, lengths=torch.ones_like(values))


def bags(rows: dict[str, int]) -> EmbeddingBagCollection:
    """Returns tables whose features have their names; they get their rows when they are sharded."""
    tables = [EmbeddingBagConfig(n, DIM, name, feature_names=[name]) for name, n in rows.items()]
    return EmbeddingBagCollection(tables, device=torch.device("meta"))


def layers(inputs: int, device: torch.device) -> nn.Module:
    """Returns the dense part of a tower."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, DIM)).to(device)


class TwoTowers(nn.Module):
    """Makes vectors of queries and of items."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.user = bags({"user": USERS})
        views = EmbeddingConfig(ITEMS, DIM, "viewed_item", feature_names=["views"])
        self.views = EmbeddingCollection([views], device=torch.device("meta"))
        self.attention = nn.Linear(DIM, 1, device=device)
        self.query_layers = layers(2 * DIM, device)
        self.item = bags({"item": ITEMS, "category": CATEGORIES})
        self.item_layers = layers(2 * DIM, device)

    def forward(
        self, queries: KeyedJaggedTensor, items: KeyedJaggedTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a vector for each query and for each item."""
        return self.of_queries(queries), self.of_items(items)

    def of_queries(self, queries: KeyedJaggedTensor) -> torch.Tensor:
        """Returns a vector for each query."""
        user, views = self.user(queries)["user"], self._attended(self.views(queries)["views"])
        return self.query_layers(torch.cat([user, views], dim=1))

    def of_items(self, items: KeyedJaggedTensor) -> torch.Tensor:
        """Returns a vector for each item."""
        pooled = self.item(items)
        return self.item_layers(torch.cat([pooled["item"], pooled["category"]], dim=1))

    def _attended(self, views: JaggedTensor) -> torch.Tensor:
        """Returns a weighted mean of each sequence, zeros for an empty one."""
        rows_BLD = views.to_padded_dense(MOST_VIEWS)
        place = torch.arange(MOST_VIEWS, device=rows_BLD.device)
        is_there = place < views.lengths()[:, None]
        scores = self.attention(rows_BLD).squeeze(2).masked_fill(~is_there, -1e9)
        return (scores.softmax(dim=1).unsqueeze(2) * rows_BLD).sum(dim=1)


class InBatchLoss(nn.Module):
    """Says how well each query knows its own item from the others of the batch.

    Popular items are in more batches, so each score is lowered by the logarithm of how often its
    item was seen (Yi et al., RecSys 2019).
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._seen = torch.ones(ITEMS, device=device)

    def forward(self, query: torch.Tensor, item: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Returns the loss of a batch, whose items have these ids."""
        self._seen += torch.bincount(ids, minlength=ITEMS)
        scores = query @ item.T - (self._seen / self._seen.sum()).log()[ids]
        own = torch.arange(len(ids), device=ids.device)
        is_same_item = (ids[:, None] == ids) & (own[:, None] != own)
        return nn.functional.cross_entropy(scores.masked_fill(is_same_item, -1e9), own)


@torch.no_grad()
def recall(towers: TwoTowers, held_out: Clicks, k: int, device: torch.device) -> float:
    """Returns the share of clicks whose item is among the k best of all items, on all ranks."""
    items = towers.of_items(item_features(torch.arange(ITEMS)).to(device))
    scores = towers.of_queries(held_out.queries.to(device)) @ items.T
    found = (scores.topk(k).indices == held_out.items.to(device)[:, None]).any(dim=1)
    share = found.double().mean()
    dist.all_reduce(share)
    return share.item() / dist.get_world_size()


def sharded(towers: TwoTowers, device: torch.device) -> DistributedModelParallel:
    """Plans and shards all tables, on all ranks, and says how."""
    adagrad = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    sharders = fused_sharders(fused_params=adagrad)
    ids = {"user": 1.0, "item": 1.0, "category": 1.0, "viewed_item": MOST_VIEWS / 2}  # on average
    lengths = {name: ParameterConstraints(pooling_factors=[mean]) for name, mean in ids.items()}
    plan = FusedShardingPlanner(constraints=lengths).collective_plan(towers, sharders)
    if dist.get_rank() == 0:
        for module, tables in plan.plan.items():
            for name, table in tables.items():
                print(f"{module + '.' + name:<20} {table.sharding_type}")
    return DistributedModelParallel(towers, device=device, plan=plan, sharders=sharders)


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Trains, and prints recall before and after."""
    rank = dist.get_rank()

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    towers = TwoTowers(device)
    dense = [*towers.attention.parameters(), *towers.query_layers.parameters()]
    dense += towers.item_layers.parameters()
    model = sharded(towers, device)
    optimizer = torch.optim.Adam(dense, lr=0.003)
    loss_of = InBatchLoss(device)
    held_out = Shop(seed=1000 + rank).clicks(HELD_OUT)
    chance = options.k / ITEMS
    before = recall(model.module, held_out, options.k, device)
    say(f"recall@{options.k} before training: {before:.4f} (by chance {chance:.4f})")
    shop = Shop(seed=rank)  # every rank has clicks of its own
    for step in range(1, options.steps + 1):
        clicks = shop.clicks(options.batch_size)
        ids = clicks.items.to(device)
        query, item = model(clicks.queries.to(device), item_features(clicks.items).to(device))
        loss = loss_of(query, item, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == options.steps:
            say(f"step {step}  loss {loss.item():.4f}")
    after = recall(model.module, held_out, options.k, device)
    say(f"recall@{options.k} after training: {after:.4f}")


def number(least: int, most: int) -> Callable[[str], int]:
    """Returns what reads a whole number of this range from the command line."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            allowed = f"must be a whole number from {least} to {most}"
            raise argparse.ArgumentTypeError(f"is {text!r}, {allowed}")
        return int(text)

    return read


def main() -> None:
    """Starts the process group: of torchrun, or of this process alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=number(1, 1_000_000), default=300, help="(%(default)s)")
    parser.add_argument(
        "--batch-size", type=number(2, 65_536), default=256, help="clicks of a rank (%(default)s)"
    )
    parser.add_argument("--k", type=number(1, ITEMS), default=10, help="of recall (%(default)s)")
    options = parser.parse_args()
    for name in ("torchrec", "torch.fx"):  # which say much about themselves
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
        os.environ.setdefault(name, alone)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    if has_gpus:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpus else "gloo")
    torch.manual_seed(0)
    train(options, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
