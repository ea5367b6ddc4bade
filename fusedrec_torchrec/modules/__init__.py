"""The sharded modules: TorchRec's own, which also know ``fused_row_wise``.

Fused and stock tables live side by side in one module; everything but the fused tables' stages
is inherited: state dicts, optimizers, pipelines, stock shardings.
"""

from fusedrec_torchrec.modules.embedding import FusedShardedEmbeddingCollection
from fusedrec_torchrec.modules.embedding_bag import FusedShardedEmbeddingBagCollection
from fusedrec_torchrec.modules.feature_processed import (
    FusedShardedFeatureProcessedEmbeddingBagCollection,
)
from fusedrec_torchrec.modules.fused_part import KnownNames

__all__ = [
    "FusedShardedEmbeddingBagCollection",
    "FusedShardedEmbeddingCollection",
    "FusedShardedFeatureProcessedEmbeddingBagCollection",
    "KnownNames",
]
