"""The batches of a run: what its configuration says about their order, size and checks."""

from collections.abc import Collection

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.samples import Source
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.data.alternation import Rates
from fusedrec_torchrec.training.data.batch_check import BatchCheck
from fusedrec_torchrec.training.data.hot_first import HotFirst
from fusedrec_torchrec.training.data.loader import Loader
from fusedrec_torchrec.training.data.own_batches import OwnBatches, OwnLoader
from fusedrec_torchrec.training.data.separated_loader import SeparatedLoader
from fusedrec_torchrec.training.data.split import split
from fusedrec_torchrec.training.source import hot_samples

__all__ = ["eval_loader", "first_rates", "train_loader"]


def train_loader(
    config: TrainConfig,
    source: Source,
    rank: int,
    world_size: int,
    rates: Rates | None = None,
    hashed: Collection[str] = (),
) -> Loader | SeparatedLoader | OwnLoader:
    """Makes the loader of batches to train on; hot and cold ones alternate as ``rates`` say."""
    rates = rates or first_rates(config)
    if isinstance(source, OwnBatches):
        return OwnLoader(source.train, config.steps, batch_check(source, hashed))

    def loader(span: tuple[int, int], hot: HotFirst | None = None) -> Loader:
        return Loader(
            source,
            span,
            batch_size=config.data.batch_size,
            lanes=config.data.lanes,
            rank=rank,
            world_size=world_size,
            shuffle=config.data.shuffle and config.data.source != "synthetic",
            chunk_batches=config.data.chunk_batches,
            workers=config.data.workers,
            seed=config.data.seed,
            hot=hot,
            check=batch_check(source, hashed),
        )

    span = split(source, config.data.held_out)[0]
    order = config.data.hot_batches.order
    if order == "mixed":
        return loader(span)
    assert config.sharding.hot.hot_set is not None
    hot_set = HotSet.load(config.sharding.hot.hot_set)
    if order == "stream":
        return loader(span, HotFirst(hot_set, rates))
    # What does not fill a hot batch goes with the cold ones.
    hot = hot_samples(config, source) // config.data.batch_size * config.data.batch_size
    return SeparatedLoader(loader((span[0], hot)), loader((span[0] + hot, span[1] - hot)), rates)


def first_rates(config: TrainConfig) -> Rates:
    """Returns how hot and cold batches alternate when training begins."""
    hot = config.data.hot_batches
    return Rates(hot.adaptive, [(0, hot.rate)])


def eval_loader(
    config: TrainConfig,
    source: Source,
    rank: int,
    world_size: int,
    hashed: Collection[str] = (),
) -> Loader | OwnLoader:
    """Makes the loader of batches to evaluate on, in their order, read in the training process."""
    if isinstance(source, OwnBatches):
        return OwnLoader(source.evaluation, config.eval_batches, batch_check(source, hashed))
    return Loader(
        source,
        split(source, config.data.held_out)[1],
        batch_size=config.data.eval_batch_size or config.data.batch_size,
        lanes=config.data.lanes,
        rank=rank,
        world_size=world_size,
        shuffle=False,
        chunk_batches=1,
        check=batch_check(source, hashed),
    )


def batch_check(source: Source, hashed: Collection[str]) -> BatchCheck:
    """Returns the check of batches; ids of tables where they are hashed may be anything."""
    rows = source.table_rows
    return BatchCheck(
        {
            feature: None if table in hashed else rows[table]
            for feature, table in source.features.items()
        }
    )
