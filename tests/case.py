"""Descriptions of training runs that the parity tests compare, and how to build them.

Everything is derived from a ``Case``, so every rank can build its own part, and also the whole
run for the unsharded reference.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import LazyAwaitable, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

import fusedrec_torchrec as fr
from fusedrec_torchrec.exchange.options import InputDist

OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    # On CUDA only.
    "adam": EmbOptimType.ADAM,
    "partial_rowwise_adam": EmbOptimType.PARTIAL_ROWWISE_ADAM,
    "lamb": EmbOptimType.LAMB,
    "partial_rowwise_lamb": EmbOptimType.PARTIAL_ROWWISE_LAMB,
}
DTYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16}


@dataclass(frozen=True)
class Table:
    name: str
    rows: int
    dim: int = 8
    features: tuple[str, ...] = ()
    pooling: str = "sum"
    dtype: str = "fp32"
    sharding: str = "fused_row_wise"
    rows_per_rank: tuple[int, ...] | None = None
    kernel: str = "fused"
    hot: tuple[int, ...] | None = None
    frozen: bool = False

    @property
    def feature_names(self) -> list[str]:
        return list(self.features) or [f"f_{self.name}"]


@dataclass(frozen=True)
class Case:
    """A training run.

    Attributes:
        integers: ids, weights and gradients are such that float32 sums are exact in any order.
        batch_sizes: samples of each rank; a tuple of tuples gives them per step.
        lengths: possible numbers of ids in a bag.
        skew: exponent that makes low ids more frequent, 0 for uniform ids.
        repeated: whether bags repeat: of every feature, the last ones are those before.
        settings: of FBGEMM's optimizer, on top of learning rate and eps.
    """

    tables: tuple[Table, ...]
    batch_sizes: tuple[int, ...]
    kind: str = "ebc"
    optimizer: str = "sgd"
    learning_rate: float = 0.25
    eps: float = 2.0**-10
    steps: int = 5
    weighted: bool = False
    integers: bool = True
    lengths: tuple[int, ...] = (0, 1, 2, 4)
    skew: float = 2.0
    repeated: bool = False
    id_dtype: str = "int64"
    length_dtype: str = "int32"
    seed: int = 0
    input_dist: InputDist = "single_shot"
    output_dtype: str = "fp32"
    vbe: bool = False
    device: str = "cpu"
    hot_options: fr.HotOptions | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    grid: fr.GridOptions | None = None
    codecs: fr.Codecs | None = None

    @property
    def features(self) -> list[str]:
        return list(dict.fromkeys(f for t in self.tables for f in t.feature_names))

    def only(self, sharding: str) -> "Case":
        """The same run with all tables sharded one stock way."""
        return dataclasses.replace(
            self, tables=tuple(dataclasses.replace(t, sharding=sharding) for t in self.tables)
        )


def generator(*seeds: int) -> torch.Generator:
    seed = 0
    for s in seeds:
        seed = (seed * 1_000_003 + s + 12345) % (1 << 62)
    return torch.Generator().manual_seed(seed)


def initial_weight(case: Case, index: int) -> torch.Tensor:
    table = case.tables[index]
    g = generator(case.seed, 1, index)
    weight = (
        torch.randint(-4, 5, (table.rows, table.dim), generator=g).float()
        if case.integers
        else torch.randn(table.rows, table.dim, generator=g)
    )
    return weight.half().float() if table.dtype == "fp16" else weight


def batch(case: Case, step: int, rank: int) -> KeyedJaggedTensor:
    """The batch of one rank in one step."""
    g = generator(case.seed, 2, step, rank)
    rows = {f: min(t.rows for t in case.tables if f in t.feature_names) for f in case.features}
    size = case.batch_sizes[rank]
    strides = [
        int(torch.randint(1, size + 1, (1,), generator=g)) if case.vbe and size else size
        for _ in case.features
    ]
    lengths, ids = [], []
    kept: list[torch.Tensor] = []  # where the ids are from that stand in the batch, if bags repeat
    for feature, stride in zip(case.features, strides, strict=True):
        length = torch.tensor(case.lengths)[
            torch.randint(len(case.lengths), (stride,), generator=g)
        ]
        if case.repeated:
            length = length[torch.arange(stride) % max(stride // 2, 1)]
            half = int(length[: max(stride // 2, 1)].sum())
            kept.append(torch.arange(int(length.sum())) % max(half, 1) + sum(map(len, kept)))
        uniform = torch.rand(int(length.sum()), generator=g)
        lengths.append(length)
        ids.append(
            (uniform ** (1 + case.skew) * rows[feature]).long().clamp_(max=rows[feature] - 1)
        )
    values = torch.cat(ids)
    weights = None
    if case.weighted:
        weights = (
            torch.randint(1, 4, values.shape, generator=g).float()
            if case.integers
            else torch.rand(values.shape, generator=g)
        )
    if case.repeated:
        source = torch.cat(kept)
        values = values[source]
        weights = None if weights is None else weights[source]
    inverse = None
    if case.vbe:
        picks = [torch.randint(max(stride, 1), (size,), generator=g) for stride in strides]
        inverse = (case.features, torch.stack(picks))
    return KeyedJaggedTensor(
        keys=case.features,
        values=values.to(getattr(torch, case.id_dtype)),
        lengths=torch.cat(lengths).to(getattr(torch, case.length_dtype)),
        weights=weights,
        stride_per_key_per_rank=[[s] for s in strides] if case.vbe else None,
        inverse_indices=inverse,
    )


def coefficients(case: Case, step: int, rank: int, name: str, like: torch.Tensor) -> torch.Tensor:
    """Gradient of the loss with respect to an output: the loss is linear in the outputs.

    Positive where an optimizer divides by a norm, so that rounding does not meet cancellation.
    """
    g = generator(case.seed, 3, step, rank, sum(ord(c) * (i + 1) for i, c in enumerate(name)))
    if case.integers:
        return torch.randint(1, 4, like.shape, generator=g).to(like.dtype)
    if case.optimizer == "sgd":
        return torch.randn(like.shape, generator=g).to(like.dtype)
    return torch.rand(like.shape, generator=g).add_(0.5).to(like.dtype)


def unsharded(case: Case, device: str = "meta") -> nn.Module:
    module = _unsharded(case, torch.device(device))
    parameters = dict(module.named_parameters())
    for t in case.tables:
        parameters[f"{prefix(case)}.{t.name}.weight"].requires_grad_(not t.frozen)
    return module


def _unsharded(case: Case, torch_device: torch.device) -> nn.Module:
    if case.kind == "ec":
        return EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=t.name,
                    num_embeddings=t.rows,
                    embedding_dim=t.dim,
                    feature_names=t.feature_names,
                    data_type=DTYPES[t.dtype],
                )
                for t in case.tables
            ],
            device=torch_device,
        )
    bags = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=t.name,
                num_embeddings=t.rows,
                embedding_dim=t.dim,
                feature_names=t.feature_names,
                pooling=PoolingType.MEAN if t.pooling == "mean" else PoolingType.SUM,
                data_type=DTYPES[t.dtype],
            )
            for t in case.tables
        ],
        is_weighted=case.weighted or case.kind == "fp_ebc",
        device=torch_device,
    )
    if case.kind == "fp_ebc":
        return FeatureProcessedEmbeddingBagCollection(
            bags,
            PositionWeightedModuleCollection(
                {f: max(case.lengths) for f in case.features}, device=torch.device("cpu")
            ),
        )
    return bags


def prefix(case: Case) -> str:
    return {
        "ebc": "embedding_bags",
        "ec": "embeddings",
        "fp_ebc": "_embedding_bag_collection.embedding_bags",
    }[case.kind]


class Wrapper(nn.Module):
    """A model with one embedding module; returns tensors, as DistributedDataParallel wants it."""

    def __init__(self, sparse: nn.Module) -> None:
        super().__init__()
        self.sparse = sparse

    def forward(self, features: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        return outputs_by_name(self.sparse(features))


def local_device(case: Case) -> torch.device:
    """This rank's device."""
    return torch.device("cpu") if case.device == "cpu" else torch.device("cuda", dist.get_rank())


def parallel(
    model: nn.Module,
    plan: ShardingPlan,
    sharders: list[Any],
    device: torch.device | None = None,
    grid: fr.GridOptions | None = None,
) -> DistributedModelParallel:
    """The model in DistributedModelParallel or GridModelParallel, on all ranks."""
    if grid is not None:
        return fr.GridModelParallel(model, grid, device, plan, sharders)
    group = dist.group.WORLD
    assert group is not None
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(group),
        plan=plan,
        sharders=sharders,
        device=device or torch.device("cpu"),
    )


def sharded(
    case: Case, options: fr.ExchangeOptions | None = None, hot: fr.HotOptions | None = None
) -> DistributedModelParallel:
    """The case's module in DistributedModelParallel, with its initial weights."""
    sharders = fr.fused_sharders(
        fused_params={
            "optimizer": OPTIMIZERS[case.optimizer],
            "learning_rate": case.learning_rate,
            "eps": case.eps,
            "output_dtype": SparseType.from_dtype(
                torch.float32 if case.output_dtype == "fp32" else torch.float16
            ),
            **dict(case.settings),
        },
        options=options or fr.ExchangeOptions(input_dist=case.input_dist, codecs=case.codecs),
        hot=hot or case.hot_options,
    )
    module = unsharded(case)
    sharder = next(s for s in sharders if s.module_type is type(module))
    world_size = case.grid.sharding_group_size if case.grid else dist.get_world_size()
    generators = {
        "fused_row_wise": lambda i, t: fr.fused_row_wise(t.rows_per_rank, t.kernel, t.hot),
        "fused_table_wise": lambda i, t: fr.fused_table_wise(i % world_size, t.kernel),
        "fused_column_wise": lambda i, t: fr.fused_column_wise(
            [
                (i + c) % world_size
                for c in range(
                    max(n for n in (1, 2, 4) if n <= world_size and t.dim % (4 * n) == 0)
                )
            ],
            t.kernel,
        ),
        "table_wise": lambda i, t: table_wise(rank=i % world_size, compute_kernel="fused"),
        "row_wise": lambda i, t: row_wise(compute_kernel="fused"),
        "column_wise": lambda i, t: column_wise(
            ranks=[r % world_size for r in range(t.dim // 4)], compute_kernel="fused"
        ),
        "data_parallel": lambda i, t: data_parallel(),
    }
    plan = construct_module_sharding_plan(
        module,
        {t.name: generators[t.sharding](i, t) for i, t in enumerate(case.tables)},
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type=case.device,
    )
    model = parallel(
        Wrapper(module), ShardingPlan({"sparse": plan}), sharders, local_device(case), case.grid
    )
    state = {
        f"sparse.{prefix(case)}.{t.name}.weight": initial_weight(case, i).to(
            torch.float16 if t.dtype == "fp16" else torch.float32
        )
        for i, t in enumerate(case.tables)
    }
    model.load_state_dict(state, strict=False)
    return model


def outputs_by_name(output: Any) -> dict[str, torch.Tensor]:
    """Pooled embeddings or sequence values by embedding name."""
    if isinstance(output, LazyAwaitable):
        output = output.wait()
    if isinstance(output, KeyedTensor):
        return output.to_dict()
    return {name: jagged.values() for name, jagged in output.items()}
