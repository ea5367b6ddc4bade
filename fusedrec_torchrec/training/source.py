"""Opens the data that a configuration names, and reads batches of it."""

from pathlib import Path

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.samples import Source
from fusedrec_torchrec.access.synthetic import SyntheticData, SyntheticTable
from fusedrec_torchrec.training.config import TrainConfig
from fusedrec_torchrec.training.data.data_config import copies_of
from fusedrec_torchrec.training.data.prepare import prepare, prepare_table
from fusedrec_torchrec.training.data.prepare_options import PrepareOptions
from fusedrec_torchrec.training.data.prepared import PreparedData
from fusedrec_torchrec.training.data.separate import HOT_SET
from fusedrec_torchrec.training.data.spelling import as_setting

__all__ = ["hot_samples", "open_source", "prepared_folder"]


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
    if data.source == "table":
        return _open_table(config, progress)
    if data.source == "python":
        raise ValueError(
            "data.source is python, which is for programs that pass their own batches to "
            "fusedrec_torchrec.training.train"
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


def prepared_folder(config: TrainConfig) -> Path:
    """Returns the folder of the prepared data, of a configuration whose data is in files."""
    if config.data.table is None:
        assert config.data.criteo.prepared is not None
        return config.data.criteo.prepared
    return config.data.table.prepared or config.logging.directory / "data"


def _open_table(config: TrainConfig, progress: bool) -> Source:
    table, folder = config.data.table, prepared_folder(config)
    assert table is not None
    if table.files:
        return prepare_table(table, folder, progress, as_setting("data.table"))
    if table.prepared is None:
        raise ValueError(
            "data.table.files is empty, must name files, folders or patterns (or "
            "data.table.prepared a folder of prepared data)"
        )
    return PreparedData.open(folder)


def hot_samples(config: TrainConfig, source: Source) -> int:
    """Returns how many hot samples stand at the beginning of data that was sorted.

    Raises:
        ValueError: it was not, or with another share held out, or by other hot rows.
    """
    separated = source.hot_samples if isinstance(source, PreparedData) else None
    where = "data.criteo.prepared" if config.data.table is None else "data.table.prepared"
    if separated is None:
        raise ValueError(
            "data.hot_batches.order is separated, which needs data of `fusedrec separate` in "
            f"{where}"
        )
    count, held_out = separated
    if source.held_out is None and held_out != config.data.held_out:
        raise ValueError(
            f"data.held_out is {config.data.held_out}, must be {held_out}, the share that was held "
            "out when the data was separated"
        )
    assert config.sharding.hot.hot_set is not None
    separated_by = prepared_folder(config) / HOT_SET
    if HotSet.load(separated_by) != HotSet.load(config.sharding.hot.hot_set):
        raise ValueError(
            f"sharding.hot.hot_set is {config.sharding.hot.hot_set}, but the data was separated by "
            f"other hot rows, {separated_by}: its hot batches would not be hot"
        )
    return count
