"""The settings of the fused exchange that a user can choose."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from fusedrec_torchrec.codecs.options import Codecs
from fusedrec_torchrec.core.config import OwnWords, section

__all__ = ["ExchangeOptions", "InputDist"]

InputDist = Literal["single_shot", "exact_counts"]
ExtraFeatures = Literal["error", "ignore"]


@section
class ExchangeOptions:
    """Says how ids, rows and gradients travel, and what is accepted as input.

    Attributes:
        input_dist: ``"single_shot"`` sends counts and ids in one all-to-all of fixed capacity
            (three collectives a training step for each module); ``"exact_counts"`` sends the
            counts first and then exactly the ids (four collectives, no padding).
        hash_ids: tables whose ids are raw 64-bit values to be hashed into the table's rows,
            by name; ``True`` means all fused tables, ``False`` none.
        hash_seed: seed of the hash.  A trained table only makes sense with the seed it was
            trained with.
        extra_features: what to do with a feature of the batch that belongs to no table of any
            module sharded by the same set of sharders: ``"error"`` or ``"ignore"``.
        capacity_slack: head room of the single-shot messages: a rank that needs room for n ids
            asks for ``n * (1 + capacity_slack)``.
        codecs: how rows and gradients travel; None: as the plan says, or else the sharder's
            ``qcomm_codecs_registry``, or else as they are.
        table_codecs: the same for single tables, by name.
    """

    input_dist: InputDist = "single_shot"
    hash_ids: OwnWords[bool | Sequence[str]] = False
    hash_seed: int = 0
    extra_features: ExtraFeatures = "error"
    capacity_slack: float = Field(default=0.125, ge=0, le=10)
    codecs: Codecs | None = None
    table_codecs: Mapping[str, Codecs] = Field(default={})

    def __post_init__(self) -> None:
        if isinstance(self.hash_ids, str):
            raise ValueError(
                f"hash_ids is the string {self.hash_ids!r}, must be True, False or a list "
                f"of table names such as [{self.hash_ids!r}]"
            )

    def hashes(self, table_name: str) -> bool:
        """Returns whether ids of this table are raw values to be hashed."""
        if isinstance(self.hash_ids, bool):
            return self.hash_ids
        return table_name in self.hash_ids
