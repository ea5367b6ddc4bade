"""What a rank sends in place of a batch that it does not have.

Batches of no ids go through TorchRec's own input dist, as a pipeline would send them, so that they
meet what other ranks send for fused and stock tables alike.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.compat.awaitables import fuse_input_dist_splits

__all__ = ["EndOfData", "PipelinedModule", "StockStandIn"]


class PipelinedModule(Protocol):
    """A sharded module that can send a batch of no ids."""

    def create_context(self) -> Any:
        """Makes a context for a batch."""
        ...

    def end_of_data_dist(self, ctx: Any) -> Awaitable[Awaitable[Any]]:
        """Sends a batch of no ids, which says that this rank's data has ended."""
        ...


class EndOfData(Awaitable[None]):
    """Batches of no ids for modules, on their way."""

    def __init__(self, modules: Sequence[PipelinedModule]) -> None:
        super().__init__()
        self._context = context = TrainPipelineContext(version=1)
        for number, module in enumerate(modules):
            name = str(number)
            context.module_contexts[name] = ctx = module.create_context()
            context.input_dist_splits_requests[name] = module.end_of_data_dist(ctx)
        fuse_input_dist_splits(context)

    def _wait_impl(self) -> None:
        # Headers first: what they say is an error on all ranks, who may be gone after that.
        requests = [splits.wait() for _, splits in self._context.fused_splits_awaitables]
        for tensors in (awaitable for request in requests for awaitable in request):
            tensors.wait()


class StockStandIn:
    """Makes batches of no ids for a module of stock tables.

    Args:
        like: a batch of the module.
        names: the feature of each slot of the module, in order.
    """

    def __init__(self, like: KeyedJaggedTensor | TensorDict, names: Sequence[str]) -> None:
        if isinstance(like, TensorDict):  # TorchRec puts its features into the order of the slots
            like = KeyedJaggedTensor.from_lengths_sync(
                list(names),
                torch.empty(0, dtype=torch.int64, device=like.device),
                torch.zeros(len(names), dtype=torch.int64, device=like.device),
            )
        self._keys = like.keys()
        self._variable = like.variable_stride_per_key()
        inverse = like.inverse_indices_or_none()
        self._inverse_names = None if inverse is None else inverse[0]
        weights = like.weights_or_none()
        self._values = like.values().new_empty(0)
        self._weights = None if weights is None else weights.new_empty(0)
        self._lengths = like.lengths().new_zeros(len(self._keys))

    def batch(self) -> KeyedJaggedTensor:
        """Makes a batch of one sample without ids."""
        inverse = None
        if self._inverse_names is not None:
            indices = self._values.new_zeros(len(self._inverse_names), 1, dtype=torch.int64)
            inverse = (self._inverse_names, indices)
        return KeyedJaggedTensor(
            keys=self._keys,
            values=self._values,
            weights=self._weights,
            lengths=self._lengths,
            stride=None if self._variable else 1,
            stride_per_key_per_rank=[[1]] * len(self._keys) if self._variable else None,
            inverse_indices=inverse,
        )
