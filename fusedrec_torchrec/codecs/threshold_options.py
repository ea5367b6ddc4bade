"""What a user can choose for data-parallel gradients: which entries travel, and how."""

from fusedrec_torchrec.codecs.options import NUMBERS, NumberType
from fusedrec_torchrec.core.config import OwnWords, section

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

    density: float = 0.009
    every: int = 10
    values: OwnWords[NumberType] = "bf16"
    min_elements: int = 256
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"density is {self.density}, must be in (0, 1]")
        if self.every < 1:
            raise ValueError(f"every is {self.every}, must be at least 1")
        if self.values not in NUMBERS:
            raise ValueError(f"values is {self.values!r}, must be one of {', '.join(NUMBERS)}")
        if self.min_elements < 0:
            raise ValueError(f"min_elements is {self.min_elements}, must be at least 0")
