"""Buckets without a sharded model around them, for tests of replicas."""

from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from torch import nn
from torchrec.modules.embedding_configs import data_type_to_sparse_type

from fusedrec_torchrec.compat.bucket_table import BucketKernel, BucketTable
from fusedrec_torchrec.replicas.replica import Replica
from tests.case import DTYPES, OPTIMIZERS


class LocalKernel(BucketKernel):
    """A bucket without TorchRec's view of its optimizer, which needs a process group."""

    def __init__(self, rows: int, frozen: bool, **settings: Any) -> None:
        nn.Module.__init__(self)
        self._settings = settings
        self._emb_module = BucketTable(
            table_rows=[rows], location=EmbeddingLocation.HOST, frozen=frozen, **settings
        )
        self._offsets = torch.empty(0, dtype=torch.int32)


def kernel_of(
    rows: int = 12,
    dim: int = 4,
    optimizer: str = "sgd",
    dtype: str = "fp32",
    frozen: bool = False,
    **settings: Any,
) -> BucketKernel:
    """A bucket of one table, whose rows are all zero."""
    kernel = LocalKernel(
        rows,
        frozen,
        dim=dim,
        compute_device=ComputeDevice.CPU,
        device=torch.device("cpu"),
        weights_precision=data_type_to_sparse_type(DTYPES[dtype]),
        bounds_check_mode=BoundsCheckMode.NONE,
        optimizer=OPTIMIZERS[optimizer],
        learning_rate=0.5,
        **settings,
    )
    for tensor in kernel.table.split_embedding_weights():
        tensor.detach().zero_()
    return kernel


def replica_of(capacity: int, dim: int = 4, optimizer: str = "sgd", **settings: Any) -> Replica:
    """An empty replica of rows of a bucket."""
    return Replica.empty(kernel_of(dim=dim, optimizer=optimizer, **settings), capacity)


def places_of(*places: int) -> torch.Tensor:
    return torch.tensor(places, dtype=torch.int32)
