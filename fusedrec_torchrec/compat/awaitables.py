"""The parts of TorchRec's awaitables that it waits for one by one."""

import torch
from torchrec.distributed.embedding import EmbeddingCollectionAwaitable
from torchrec.distributed.embeddingbag import VariableBatchEmbeddingBagCollectionAwaitable
from torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext
from torchrec.distributed.train_pipeline.utils import _fuse_input_dist_splits
from torchrec.distributed.types import Awaitable

__all__ = ["fuse_input_dist_splits", "parts_of_pooled", "parts_of_sequences"]


def parts_of_pooled(
    output: VariableBatchEmbeddingBagCollectionAwaitable,
) -> list[Awaitable[torch.Tensor]]:
    """Returns the output of each sharding of an EmbeddingBagCollection."""
    return output._awaitables


def parts_of_sequences(output: EmbeddingCollectionAwaitable) -> list[Awaitable[torch.Tensor]]:
    """Returns the output of each sharding of an EmbeddingCollection."""
    return output._awaitables_per_sharding


def fuse_input_dist_splits(context: TrainPipelineContext) -> None:
    """Sends the sizes of all modules' batches in one message, as a pipeline does."""
    _fuse_input_dist_splits(context)
