"""What a user can choose for data-parallel gradients: which entries travel, and how."""

from pydantic import Field

from fusedrec_torchrec.codecs.options import NumberType
from fusedrec_torchrec.core.config import section

__all__ = ["ThresholdOptions"]


@section
class ThresholdOptions:
    """Says which entries of gradients travel: those that reach a threshold; others are kept.

    Attributes:
        density: share of the entries that travel in a step; 1 sends all, in an all-reduce.  The
            default is a hundredth of the bytes of an all-reduce between two ranks.
        every: steps from one renewal of the thresholds to the next; where more entries reach a
            threshold than there is room for, it is renewed in the next step.
        values: how the entries travel; what rounding takes from them is kept, too.
        min_elements: parameters with fewer elements travel whole.
        error_feedback: whether what does not travel is kept and added to the next gradients.
    """

    density: float = Field(default=0.009, gt=0, le=1)
    every: int = Field(default=10, ge=1)
    values: NumberType = "bf16"
    min_elements: int = Field(default=256, ge=0)
    error_feedback: bool = True
