"""Opens the data that a configuration names, and reads batches of it."""

from collections.abc import Collection
from pathlib import Path

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.samples import Source
from fusedrec_torchrec.access.synthetic import SyntheticData, SyntheticTable
from fusedrec_torchrec.training.config import TrainConfig, copies_of
from fusedrec_torchrec.training.data.alternation import Rates
from fusedrec_torchrec.training.data.batch_check import BatchCheck
from fusedrec_torchrec.training.data.hot_first import HotFirst
from fusedrec_torchrec.training.data.loader import Loader, split
from fusedrec_torchrec.training.data.prepare import PrepareOptions, prepare
from fusedrec_torchrec.training.data.prepared import PreparedData
from fusedrec_torchrec.training.data.separate import HOT_SET
from fusedrec_torchrec.training.data.separated_loader import SeparatedLoader
from fusedrec_torchrec.training.data.spelling import as_setting

__all__ = ["eval_loader", "first_rates", "hot_samples", "open_source", "train_loader"]


def open_source(config: TrainConfig, progress: bool = False) -> Source:
    """Opens the data, and prepares it first where that has not been done.

    Needs no process group: what is wrong with the data comes up before there is one.

    Raises:
        ValueError: files missing, empty or malformed.
    """
    data = config.data
    if data.source == "synthetic":
        return SyntheticData(
            tables=[
                SyntheticTable(
                    name=name,
                    rows=table.rows,
                    pooling=table.pooling,
                    zipf=table.zipf,
                    drift=table.drift,
                )
                for table in config.tables
                for name in copies_of(table)
            ],
            dense_features=data.synthetic.dense_features,
            samples=data.synthetic.samples,
            click_rate=data.synthetic.click_rate,
            signal=data.synthetic.signal,
            seed=data.seed,
        )
    assert data.criteo.prepared is not None
    if not data.criteo.files:
        return PreparedData.open(data.criteo.prepared)
    options = PrepareOptions(
        min_count=data.criteo.min_count,
        max_rows=data.criteo.max_rows,
        on_bad_line=data.criteo.on_bad_line,
    )
    files = [Path(file) for file in data.criteo.files]
    spelling = as_setting("data.criteo")
    return prepare(files, data.criteo.prepared, options, progress, spelling)


def train_loader(
    config: TrainConfig,
    source: Source,
    rank: int,
    world_size: int,
    rates: Rates | None = None,
    hashed: Collection[str] = (),
) -> Loader | SeparatedLoader:
    """Returns the batches to train on; hot and cold ones alternate as ``rates`` say."""
    rates = rates or first_rates(config)

    def loader(span: tuple[int, int], hot: HotFirst | None = None) -> Loader:
        return Loader(
            source,
            span,
            batch_size=config.data.batch_size,
            lanes=config.data.lanes,
            rank=rank,
            world_size=world_size,
            shuffle=config.data.shuffle and config.data.source == "criteo",
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


def hot_samples(config: TrainConfig, source: Source) -> int:
    """Returns how many hot samples stand at the beginning of data that was sorted.

    Raises:
        ValueError: it was not, or with another share held out, or by other hot rows.
    """
    separated = source.hot_samples if isinstance(source, PreparedData) else None
    if separated is None:
        raise ValueError(
            "data.hot_batches.order is separated, which needs data of `fusedrec separate` in "
            "data.criteo.prepared"
        )
    count, held_out = separated
    if held_out != config.data.held_out:
        raise ValueError(
            f"data.held_out is {config.data.held_out}, must be {held_out}, the share that was held "
            "out when the data was separated"
        )
    assert config.data.criteo.prepared is not None and config.sharding.hot.hot_set is not None
    separated_by = Path(config.data.criteo.prepared) / HOT_SET
    if HotSet.load(separated_by) != HotSet.load(config.sharding.hot.hot_set):
        raise ValueError(
            f"sharding.hot.hot_set is {config.sharding.hot.hot_set}, but the data was separated by "
            f"other hot rows, {separated_by}: its hot batches would not be hot"
        )
    return count


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
) -> Loader:
    """Returns the batches to evaluate on, in their order; read in the training process."""
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
    return BatchCheck(
        {name: None if name in hashed else rows for name, rows in source.table_rows.items()}
    )
