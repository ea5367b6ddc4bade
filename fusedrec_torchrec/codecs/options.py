"""The settings of codecs that a user can choose."""

from typing import Literal, get_args

from pydantic import Field

from fusedrec_torchrec.core.config import section

__all__ = [
    "CODECS",
    "NARROW",
    "NUMBERS",
    "WHOLE_ROWS",
    "CodecOptions",
    "Codecs",
    "NarrowType",
    "NumberType",
]

ScaledType = Literal["fp16", "bf16"]  # formats of single numbers in fewer bits
SCALED: tuple[ScaledType, ...] = get_args(ScaledType)
NumberType = Literal["fp32", ScaledType]  # formats of single numbers
NUMBERS: tuple[NumberType, ...] = get_args(NumberType)
NarrowType = Literal[ScaledType, "int8"]  # formats of whole rows in fewer bits
NARROW: tuple[NarrowType, ...] = get_args(NarrowType)
CodecType = Literal["fp32", NarrowType, "dct"]
CODECS: tuple[CodecType, ...] = get_args(CodecType)
WHOLE_ROWS = tuple(kind for kind in CODECS if kind != "dct")  # that send every entry of a row
DENSITY, EVERY = 0.25, 1000


@section
class CodecOptions:
    """Says how numbers travel in one direction.

    Attributes:
        type: ``fp32`` as they are; ``fp16``, ``bf16``; ``int8`` with a scale and a bias for each
            row; ``dct`` only the entries of the largest magnitude.
        loss_scale: of fp16 and bf16: what numbers are multiplied with before they are rounded, and
            divided by on arrival.  None: fp16 takes the largest power of two that fits, anew in
            each step; bf16 needs none.
        density: of dct: share of the entries that travel.
        every: of dct: steps from one renewal of the threshold to the next.
        values: of dct: how the entries travel.
        relative: of dct: whether the threshold is in units of the largest entry of each row, so
            that each row sends its largest; if not, as in the paper, rows of small numbers may send
            nothing.
    """

    type: CodecType = "fp32"
    loss_scale: float | None = Field(default=None, gt=0)
    density: float | None = Field(default=None, gt=0, le=1)
    every: int | None = Field(default=None, ge=1)
    values: NumberType | None = None
    relative: bool | None = None

    def __post_init__(self) -> None:
        if self.loss_scale is not None and self.type not in SCALED:
            raise ValueError(
                f"loss_scale is {self.loss_scale} with type {self.type}, must be left out: it is "
                "of fp16 and bf16"
            )
        for name in ("density", "every", "values", "relative"):
            if self.type != "dct" and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} is {getattr(self, name)} with type {self.type}, must be left out: it "
                    "is of dct"
                )

    def __str__(self) -> str:
        if self.type != "dct":
            return self.type
        return f"dct {self.density or DENSITY:g} {self.values or 'fp32'}"

    @property
    def is_exact(self) -> bool:
        """Whether numbers arrive as they were sent."""
        return self.type == "fp32" or (
            self.type == "dct" and self.density == 1 and self.values in (None, "fp32")
        )


@section
class Codecs:
    """Says how rows travel to their requesters, and how their gradients travel back.

    Attributes:
        forward: of rows.
        backward: of gradients.  With dct for rows, gradients of the same entries travel, in this
            format: fp32, fp16 or bf16.
    """

    forward: CodecOptions = CodecOptions()
    backward: CodecOptions = CodecOptions()

    @property
    def are_exact(self) -> bool:
        """Whether all numbers arrive as they were sent."""
        return self.forward.is_exact and self.backward.is_exact

    def __str__(self) -> str:
        return f"rows {self.forward}, gradients {self.backward}"

    def __post_init__(self) -> None:
        if self.backward.type == "dct":
            raise ValueError(
                f"backward.type is dct, must be one of {', '.join(WHOLE_ROWS)}: with forward dct, "
                "gradients of the entries that travelled forward travel back, and backward is "
                "their format"
            )
        if self.forward.type == "dct" and self.backward.type not in NUMBERS:
            raise ValueError(
                f"backward.type is {self.backward.type} with forward dct, must be one of "
                f"{', '.join(NUMBERS)}: single entries have no row to be scaled by"
            )
