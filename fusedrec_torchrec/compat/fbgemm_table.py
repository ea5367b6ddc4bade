"""What FBGEMM's tables know of themselves and have no methods to ask for.

These are attributes without an underscore, which FBGEMM does not document either, so they stand in
``private_names`` like private ones.  The functions are for all of FBGEMM's tables; what only our
own are asked is in ``bucket_table``.
"""

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen as FbgemmTable,
)

__all__ = ["FbgemmTable", "device_of", "is_cached", "tables_of_features"]


def is_cached(table: FbgemmTable) -> bool:
    """Returns whether rows are in host memory, and the device has a cache of them."""
    return any(spec[2] == EmbeddingLocation.MANAGED_CACHING for spec in table.embedding_specs)


def tables_of_features(table: FbgemmTable) -> list[int]:
    """Returns the number of each feature's table, among those that FBGEMM's table is made of."""
    return list(table.feature_table_map)


def device_of(table: FbgemmTable) -> torch.device:
    """Returns the device that looks rows up."""
    return table.current_device
