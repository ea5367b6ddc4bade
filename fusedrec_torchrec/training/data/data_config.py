"""What data a run trains on: the sections ``data`` and ``tables`` of a configuration."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from fusedrec_torchrec.core.config import section
from fusedrec_torchrec.training.data.prepare_options import OnBadLine
from fusedrec_torchrec.training.data.table_options import TableOptions

__all__ = [
    "CriteoConfig",
    "DataConfig",
    "HotBatchesConfig",
    "SyntheticConfig",
    "TableConfig",
    "copies_of",
]

HELD_OUT = 0.1


@section
class TableConfig:
    """Describes a table of generated data, or several of a kind.

    Attributes:
        name: Name of the table and of its feature.
        rows: Number of rows.
        copies: Makes this many tables of the kind, name_0, name_1 and so on.
        pooling: Generated data: average number of ids in a sample; 1 is exactly one.
        zipf: Generated data: exponent of the Zipf law of ids; 0 is uniform.
        drift: Generated data: how many ranks of popularity the hot set moves on in 1000 samples.
    """

    name: str = Field(min_length=1)
    rows: int = Field(ge=1)
    copies: int = Field(default=1, ge=1)
    pooling: float = Field(default=1.0, gt=0, le=1000)
    zipf: float = Field(default=1.1, ge=0, le=4)
    drift: float = Field(default=0.0, ge=0)


@section
class SyntheticConfig:
    """Describes generated clicks.

    Attributes:
        dense_features: Number of dense features.
        samples: Number of samples; the last data.held_out of them are held out.
        click_rate: Share of clicks, about.
        signal: Strength of the planted model; 0 makes clicks pure noise.
    """

    dense_features: int = Field(default=8, ge=1)
    samples: int = Field(default=2_000_000, ge=1)
    click_rate: float = Field(default=0.25, gt=0, lt=1)
    signal: float = Field(default=1.0, ge=0)


@section
class CriteoConfig:
    """Says where data in Criteo's format is, and how its text is prepared.

    Attributes:
        files: Text files (.tsv, .txt, day_N, plain or .gz) or folders of them, in order; prepared
            into `prepared` when training starts.
        prepared: Folder of prepared data, as `fusedrec prepare` writes it.
        min_count: Values seen less often in a column share one row.
        max_rows: Most rows of a table; beyond it the most frequent values keep a row of their own.
        on_bad_line: What to do with a malformed line.
    """

    files: list[str] = Field(default=[])
    prepared: Path | None = None
    min_count: int = Field(default=1, ge=1)
    max_rows: int | None = Field(default=None, ge=3)
    on_bad_line: OnBadLine = "error"

    def __post_init__(self) -> None:
        if self.files and self.prepared is None:
            raise ValueError("prepared must name the folder that files are prepared into")


@section
class HotBatchesConfig:
    """Says in which order hot batches, which need hot rows only, and cold ones are trained.

    Attributes:
        order: mixed takes samples as they come; stream forms hot batches, which need hot rows only,
            and cold ones within each chunk; separated wants data that `fusedrec separate` has
            sorted.
        rate: Share of the hot (and of the cold) batches that are trained before it is the others'
            turn: of the chunk (stream) or the epoch (separated).
        adaptive: Halves the rate when the evaluation loss has risen, doubles it when it has fallen
            four times in a row; needs eval_every.
    """

    order: Literal["mixed", "stream", "separated"] = "mixed"
    rate: float = Field(default=0.5, gt=0, le=1)
    adaptive: bool = False


@section
class DataConfig:
    """Says what data is trained on, and how batches are made of it.

    Attributes:
        source: Generated clicks, data in Criteo's format, files with columns of your own, or
            batches of a Python program (`training.train`); if none, table where `table` is set, and
            synthetic elsewhere.
        synthetic: What generated clicks are like.
        criteo: Where data in Criteo's format is.
        table: Files with columns of your own, and what samples are made of them.
        batch_size: Samples of a step, of all ranks together.
        eval_batch_size: Samples of an evaluation step, of all ranks together; batch_size if none.
        held_out: Share of the data, at its end, that is kept for evaluation; table.split may say
            otherwise.
        lanes: Independent streams a batch is made of; ranks share them. Batches are the same for
            every number of ranks that divides it.
        shuffle: Shuffles training samples, anew in each epoch (data in files).
        chunk_batches: Batches that are read and shuffled together.
        hot_batches: The order of hot and cold batches.
        workers: Reader processes of each rank; 0 reads in the training process.
        seed: Of the order of samples, and of generated data.
    """

    source: Literal["synthetic", "criteo", "table", "python"] | None = None
    synthetic: SyntheticConfig = SyntheticConfig()
    criteo: CriteoConfig = CriteoConfig()
    table: TableOptions | None = None
    batch_size: int = Field(default=2048, ge=1)
    eval_batch_size: int | None = Field(default=None, ge=1)
    held_out: float = Field(default=HELD_OUT, ge=0, lt=1)
    lanes: int = Field(default=8, ge=1)
    shuffle: bool = True
    chunk_batches: int = Field(default=16, ge=1)
    hot_batches: HotBatchesConfig = HotBatchesConfig()
    workers: int = Field(default=1, ge=0)
    seed: int = Field(default=0, ge=0, lt=1 << 31)

    def __post_init__(self) -> None:
        if self.source is None:
            # So that everybody, also config.yaml of the run, sees what it is.
            object.__setattr__(self, "source", "synthetic" if self.table is None else "table")
        for name, size in (
            ("batch_size", self.batch_size),
            ("eval_batch_size", self.eval_batch_size or self.batch_size),
        ):
            if size % self.lanes:
                raise ValueError(f"{name} is {size}, must be a multiple of lanes, {self.lanes}")
        if self.source == "criteo" and self.criteo.prepared is None:
            raise ValueError("criteo.prepared must name a folder when source is criteo")
        if (self.source == "table") != (self.table is not None):
            raise ValueError(
                f"table is {'missing' if self.table is None else 'set'}, but source is "
                f"{self.source}: set table and leave out source, or leave out table"
            )
        if self.table is not None and self.table.split.by != "end" and self.held_out != HELD_OUT:
            raise ValueError(
                f"held_out is {self.held_out} and table.split.by is {self.table.split.by}, must "
                "leave out one of them: both say which samples are held out"
            )


def copies_of(table: TableConfig) -> list[str]:
    """Returns the names of the tables that an entry stands for."""
    if table.copies == 1:
        return [table.name]
    return [f"{table.name}_{i}" for i in range(table.copies)]
