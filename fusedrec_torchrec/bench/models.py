"""Models of nothing but embeddings, as one collection or as one for each table."""

from contextlib import ExitStack

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fusedrec_torchrec.sharding.modules.embedding_bag import FusedShardedEmbeddingBagCollection

__all__ = ["Model", "PerTableModel"]


class Model(nn.Module):
    """Is a model of nothing but embeddings: what sharding is about."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    @property
    def collections(self) -> dict[str, nn.Module]:
        """The collections of tables by their path in the model."""
        return {"embeddings": self.embeddings}

    def forward(self, features: KeyedJaggedTensor) -> object:
        return self.embeddings(features)


class PerTableModel(Model):
    """Exchanges each table by itself: the baseline of the paper on FusedRec (AAAI 2026).

    Every table is a collection of its own, so that its ids are made unique and travel in messages
    of their own, as its rows and gradients do.  No table waits for another: the ids of all tables
    are sent before those of the first are waited for, and so are the rows.

    Args:
        collections: one for each table; sharded with our sharder before the model is called.
    """

    embeddings: nn.ModuleList

    def __init__(self, collections: list[EmbeddingBagCollection]) -> None:
        super().__init__(nn.ModuleList(collections))

    @property
    def collections(self) -> dict[str, nn.Module]:
        return {f"embeddings.{number}": module for number, module in enumerate(self.embeddings)}

    def forward(self, features: KeyedJaggedTensor) -> list[object]:
        """Returns what each collection returns."""
        modules: list[FusedShardedEmbeddingBagCollection] = []
        with ExitStack() as calls:
            for module in self.embeddings:
                assert isinstance(module, FusedShardedEmbeddingBagCollection)
                calls.enter_context(module.plain_call())
                modules.append(module)
            contexts = [module.create_context() for module in modules]
            pairs = list(zip(modules, contexts, strict=True))
            headers = [module.input_dist(context, features) for module, context in pairs]
            under_way = [header.wait() for header in headers]
            received = [ids.wait() for ids in under_way]
            return [
                module.compute_and_output_dist(context, ids)
                for (module, context), ids in zip(pairs, received, strict=True)
            ]
