"""What a user can choose about the preparation of text."""

from typing import Literal, get_args

from pydantic import Field

from fusedrec_torchrec.core.config import section
from fusedrec_torchrec.training.data.vocabulary import RESERVED

__all__ = ["DENSE_TRANSFORMS", "ON_BAD_LINE", "DenseTransform", "OnBadLine", "PrepareOptions"]

DenseTransform = Literal["log", "none"]
DENSE_TRANSFORMS: tuple[DenseTransform, ...] = get_args(DenseTransform)
OnBadLine = Literal["error", "skip"]
ON_BAD_LINE: tuple[OnBadLine, ...] = get_args(OnBadLine)


@section
class PrepareOptions:
    """Says how text becomes parquet.

    Attributes:
        min_count: values seen less often in a column share row 1.
        max_rows: rows of a table at most, the most frequent values are kept; None is no limit.
        dense_transform: ``"log"`` is log(x + 3) with x no less than -2, as in
            ``torchrec.datasets.criteo``; missing values count as 0.
        on_bad_line: ``"error"`` or ``"skip"``.
        part_rows: samples in one parquet file.
        group_rows: samples in a row group, the unit of reading and of coarse shuffling.
        memory_mb: about what counting the values of a column may use.
    """

    min_count: int = Field(default=1, ge=1)
    max_rows: int | None = None
    dense_transform: DenseTransform = "log"
    on_bad_line: OnBadLine = "error"
    part_rows: int = Field(default=1 << 19, ge=1)
    group_rows: int = Field(default=8192, ge=1)
    memory_mb: int = Field(default=1024, ge=1)

    def __post_init__(self) -> None:
        if self.max_rows is not None and self.max_rows <= RESERVED:
            raise ValueError(
                f"max_rows is {self.max_rows}, must be more than {RESERVED}: rows 0 and 1 stand "
                "for missing and rare values"
            )
