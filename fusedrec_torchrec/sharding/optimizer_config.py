"""The optimizer of embedding tables, as configuration files say it."""

from typing import Literal, get_args

from pydantic import Field

from fusedrec_torchrec.core.config import section

__all__ = ["EMBEDDING_OPTIMIZERS", "EmbeddingOptimizer", "EmbeddingOptimizerConfig"]

EmbeddingOptimizer = Literal["rowwise_adagrad", "momentum_scaled_rowwise_adagrad", "adagrad", "sgd"]
EMBEDDING_OPTIMIZERS: tuple[EmbeddingOptimizer, ...] = get_args(EmbeddingOptimizer)


@section
class EmbeddingOptimizerConfig:
    """Chooses the optimizer of the embedding tables.

    Attributes:
        type: FBGEMM's fused optimizer of the tables; momentum_scaled is for 2D parallelism.
        learning_rate: Before the schedule.
        eps: Added to the root of the state.
        momentum_scale: What momentum_scaled_rowwise_adagrad divides its state by; the number of
            groups if none.
    """

    type: EmbeddingOptimizer = "rowwise_adagrad"
    learning_rate: float = Field(default=0.1, gt=0)
    eps: float = Field(default=1e-8, ge=0)
    momentum_scale: float | None = Field(default=None, gt=0)

    def __post_init__(self) -> None:
        if self.momentum_scale is not None and self.type != "momentum_scaled_rowwise_adagrad":
            raise ValueError(
                f"momentum_scale is {self.momentum_scale}, must be left out with type {self.type}: "
                "it is of momentum_scaled_rowwise_adagrad"
            )
