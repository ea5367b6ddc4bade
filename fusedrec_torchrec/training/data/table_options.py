"""What a user can say about files with columns of their own: ``data.table`` of a configuration."""

import re
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import Field

from fusedrec_torchrec.core.config import section
from fusedrec_torchrec.training.data.file_names import LABEL, WEIGHTS
from fusedrec_torchrec.training.data.prepare_options import OnBadLine
from fusedrec_torchrec.training.data.vocabulary import RESERVED

__all__ = [
    "CsvOptions",
    "FileFormat",
    "RowsOptions",
    "SparseOptions",
    "SplitOptions",
    "TableOptions",
    "TimePart",
    "TimestampOptions",
    "Transform",
]

FileFormat = Literal["parquet", "csv", "arrow", "feather"]
Transform = Literal["standardize", "log", "none"]
TimePart = Literal[
    "time_of_day", "minute", "hour", "hour_of_week", "weekday", "day", "month", "year", "seconds"
]
UNIT_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
NAME = re.compile(r"[A-Za-z0-9_-]+")
# A model keeps its tables in a torch.nn.ModuleDict, whose own attributes no table can be called.
TAKEN = frozenset(
    """
    T_destination add_module apply bfloat16 buffers call_super_init children clear compile cpu
    cuda double dump_patches eval extra_repr float forward get_buffer get_extra_state
    get_parameter get_submodule half ipu items keys load_state_dict modules mtia named_buffers
    named_children named_modules named_parameters parameters pop register_backward_hook
    register_buffer register_forward_hook register_forward_pre_hook register_full_backward_hook
    register_full_backward_pre_hook register_load_state_dict_post_hook
    register_load_state_dict_pre_hook register_module register_parameter
    register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state
    set_submodule share_memory state_dict to to_empty train training type update values xpu
    zero_grad
    """.split()  # noqa: SIM905
)


def _refuse_twice(what: str, names: list[str]) -> None:
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        hint = " (label is that of the label itself)" if twice[0] == LABEL else ""
        raise ValueError(f"{what} have the name {twice[0]!r} more than once{hint}")


@section
class CsvOptions:
    """Says what text files look like.

    Attributes:
        columns: Names of the columns, of files without a header; if empty, the first line of every
            file has them.
        delimiter: What stands between two values; if none, a comma, or a tab in .tsv files.
        quote: What values with a delimiter in them stand between; empty if values are never quoted.
    """

    columns: list[str] = Field(default=[])
    delimiter: str | None = Field(default=None, min_length=1, max_length=1)
    quote: str = Field(default='"', max_length=1)

    def __post_init__(self) -> None:
        _refuse_twice("columns", self.columns)
        if self.quote and self.quote == self.delimiter:
            raise ValueError(f"quote is {self.quote!r}, must not be the delimiter")
        for name, value in (("delimiter", self.delimiter), ("quote", self.quote)):
            if value and (value in "\r\n" or not value.isascii()):
                raise ValueError(f"{name} is {value!r}, must be an ASCII character in a line")


@section
class SparseOptions:
    """Describes a categorical feature.

    Attributes:
        column: Its column; the one with the feature's name if none.
        table: Its embedding table, which several features may share; one with the feature's name if
            none.
        bag: Whether a sample has any number of ids: the column holds lists, or text with a
            separator. Otherwise it has one.
        separator: What stands between the ids of a text, such as `|`; needs bag.
        weights: Column with a number for each id of the bag, by which its embedding is multiplied;
            all count once if none.
        max_ids: Most ids of a bag; those behind are left out.
    """

    column: str | None = None
    table: str | None = None
    bag: bool = False
    separator: str | None = Field(default=None, min_length=1)
    weights: str | None = None
    max_ids: int | None = Field(default=None, ge=1)

    def __post_init__(self) -> None:
        for name in ("separator", "weights", "max_ids"):
            if getattr(self, name) is not None and not self.bag:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, which is for bags: write bag: true, or "
                    "leave it out"
                )


@section
class RowsOptions:
    """Says which rows the values of a table get.

    Attributes:
        min_count: Values seen less often share one row; that of all tables if none.
        max_rows: Most rows of the table; that of all tables if none.
        hash_rows: Rows of a table without a vocabulary: the row of a value is its hash, and values
            may share it. Row 0 is that of missing values.
    """

    min_count: int | None = Field(default=None, ge=1)
    max_rows: int | None = Field(default=None, gt=RESERVED)
    hash_rows: int | None = Field(default=None, ge=2, lt=1 << 31)

    def __post_init__(self) -> None:
        for name in ("min_count", "max_rows"):
            if self.hash_rows is not None and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} is {getattr(self, name)} and hash_rows is {self.hash_rows}, must "
                    "leave out one of them: a table with hashed rows has no vocabulary"
                )


@section
class TimestampOptions:
    """Says when a sample was taken.

    Attributes:
        column: Its column: timestamps, dates, numbers with a unit, or text.
        unit: What numbers count since 1970, in UTC.
        format: Of text, in the words of strptime, such as `%y%m%d%H`; ISO 8601 if none.
        utc_offset: Hours by which the clock of the place is ahead of UTC, for parts of the time and
            for split.start, where the column is in UTC.
    """

    column: str
    unit: Literal["s", "ms", "us", "ns"] | None = None
    format: str | None = Field(default=None, min_length=1)
    utc_offset: float = Field(default=0.0, ge=-24, le=24)

    def __post_init__(self) -> None:
        if self.unit is not None and self.format is not None:
            raise ValueError(
                f"unit is {self.unit!r} and format is {self.format!r}, must leave out one of them: "
                "numbers have a unit, text has a format"
            )


@section
class SplitOptions:
    """Says which samples are held out for evaluation.

    Attributes:
        by: end takes the last data.held_out of all samples, in the order of the files; random some
            samples of all parts of the data; time those from a certain time on; file those of some
            files. Whatever is not taken by end has no part in vocabularies.
        share: random: share of the samples.
        start: time: the first moment, such as `2017-12-03` or `2017-12-03 18:00:00`.
        files: file: the files, or patterns of their names; they must be among `files`.
    """

    by: Literal["end", "random", "time", "file"] = "end"
    share: float | None = Field(default=None, gt=0, lt=1)
    start: datetime | str | None = None
    files: list[str] = Field(default=[])

    def __post_init__(self) -> None:
        needs = {"random": "share", "time": "start", "file": "files"}
        for by, name in needs.items():
            given = getattr(self, name) not in (None, [])
            if self.by == by and not given:
                raise ValueError(f"{name} is missing, must be there when by is {by}")
            if self.by != by and given:
                raise ValueError(f"{name} is for by: {by}, but by is {self.by}")
        if self.start is not None:  # one spelling, whatever YAML has made of it
            object.__setattr__(self, "start", self.start_time().isoformat(sep=" "))

    def start_time(self) -> datetime:
        """Returns the first moment that is held out, without a zone.

        Raises:
            ValueError: it is no time.
        """
        if isinstance(self.start, datetime):
            return self.start.replace(tzinfo=None)
        try:
            return datetime.fromisoformat(str(self.start)).replace(tzinfo=None)
        except ValueError:
            raise ValueError(
                f"start is {self.start!r}, must be a time such as 2017-12-03 or 2017-12-03 18:00:00"
            ) from None


@section
class TableOptions:
    """Describes files with columns of the user's own, and how samples are made of them.

    Attributes:
        files: Files, folders or patterns such as `data/*.parquet`, in order: parquet, Arrow,
            Feather, or text with columns (.csv, .tsv, .txt), plain, .gz or .zst.
        format: Of the files; by their names if none.
        csv: What text files look like.
        label: Column with 0 or 1, true or false; or an expression of columns, such as
            `behavior in [buy, cart]` or `rating >= 4`.
        dense: Columns with numbers; may be empty.
        sparse: Categorical features by name.
        timestamp: When samples were taken; for split by time and for times.
        times: New columns that are parts of the timestamp, by name, for dense and sparse.
        transform: What becomes of numbers: standardize subtracts the mean of the training samples
            and divides by their standard deviation; log is log(x + 3) with x no less than -2.
            Missing ones are the mean, or count as 0.
        transforms: Transforms of single dense columns.
        missing: Texts that stand for a missing value.
        tables: Rows of single tables.
        min_count: Values seen less often share one row.
        max_rows: Most rows of a table; beyond it the most frequent values keep a row of their own.
        split: Which samples are held out.
        on_bad_line: What to do with a malformed line or row: stop there, or count and leave it out.
        prepared: Folder for the prepared data, or one that holds it, if there are no files; `data`
            in logging.directory if none.
        part_rows: Samples in one prepared file.
        group_rows: Samples in a row group, the unit of reading and of coarse shuffling.
        memory_mb: About what counting the values of a table may use.
    """

    files: list[str] = Field(default=[])
    format: FileFormat | None = None
    csv: CsvOptions = CsvOptions()
    label: str = ""
    dense: list[str] = Field(default=[])
    sparse: dict[str, SparseOptions] = Field(default={})
    timestamp: TimestampOptions | None = None
    times: dict[str, TimePart] = Field(default={})
    transform: Transform = "standardize"
    transforms: dict[str, Transform] = Field(default={})
    missing: list[str] = Field(default=[""])
    tables: dict[str, RowsOptions] = Field(default={})
    min_count: int = Field(default=1, ge=1)
    max_rows: int | None = Field(default=None, gt=RESERVED)
    split: SplitOptions = SplitOptions()
    on_bad_line: OnBadLine = "error"
    prepared: Path | None = None
    part_rows: int = Field(default=1 << 19, ge=1)
    group_rows: int = Field(default=8192, ge=1)
    memory_mb: int = Field(default=1024, ge=1)

    def __post_init__(self) -> None:
        if not self.describes:
            if self.files or self.prepared is None:
                self._refuse_missing()
            return
        for name in ("label", "sparse"):
            if not getattr(self, name):
                self._refuse_missing()
        self._check_names()
        if self.timestamp is None and (self.split.by == "time" or self.times):
            raise ValueError(
                f"timestamp is missing, must name a column: "
                f"{'split.by is time' if self.split.by == 'time' else 'times are parts of it'}"
            )
        for name in self.transforms:
            if name not in self.dense:
                raise ValueError(
                    f"transforms names {name!r}, which is no dense column; there are "
                    f"{', '.join(self.dense) or 'none'}"
                )

    @property
    def describes(self) -> bool:
        """Whether it says how samples are made; otherwise prepared data is all there is."""
        return bool(self.label or self.dense or self.sparse)

    def _refuse_missing(self) -> None:
        if not self.files and not self.describes:
            raise ValueError(
                "files is empty, must name files, folders or patterns (or prepared a folder of "
                "prepared data)"
            )
        if not self.label:
            raise ValueError(
                "label is missing, must be a column or an expression such as "
                "'behavior in [buy, cart]' (fusedrec prepare FILES --infer suggests all of it)"
            )
        raise ValueError("sparse is empty, must have at least one feature")

    def _check_names(self) -> None:
        for name, feature in self.sparse.items():
            table = feature.table or name
            for what, text in (("feature", name), ("table", table)):
                if NAME.fullmatch(text) is None:
                    raise ValueError(
                        f"sparse has a {what} called {text!r}, must be letters, digits, _ and -: "
                        f"choose a name, and say column: {feature.column or name!r}"
                    )
            if table in TAKEN:
                raise ValueError(
                    f"sparse.{name}: the table cannot be called {table!r}, a name that torch needs "
                    f"for itself: say table: {table}s or the like"
                )
        names = [LABEL, *self.dense, *self.sparse]
        names += [f"{name}{WEIGHTS}" for name, f in self.sparse.items() if f.weights is not None]
        _refuse_twice("label, dense and sparse together", names)
        tables = {feature.table or name for name, feature in self.sparse.items()}
        for name in self.tables:
            if name not in tables:
                raise ValueError(
                    f"tables names {name!r}, which is the table of no feature; there are "
                    f"{', '.join(sorted(tables))}"
                )
