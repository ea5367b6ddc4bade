"""A configured optimizer of tables in FBGEMM's terms."""

from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType

from fusedrec_torchrec.compat.momentum_scale import MomentumScaledRowWiseAdagrad, without_scale
from fusedrec_torchrec.compat.optimizers import OPTIMIZERS
from fusedrec_torchrec.sharding.optimizer_config import EmbeddingOptimizer, EmbeddingOptimizerConfig

__all__ = ["fused_params", "state_bytes"]

FUSED_OPTIMIZERS: dict[EmbeddingOptimizer, Any] = {
    "momentum_scaled_rowwise_adagrad": MomentumScaledRowWiseAdagrad,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
}


def fused_params(config: EmbeddingOptimizerConfig) -> dict[str, Any]:
    """Returns what sharders take as ``fused_params`` for a configured optimizer."""
    params: dict[str, Any] = {
        "optimizer": FUSED_OPTIMIZERS[config.type],
        "learning_rate": config.learning_rate,
    }
    if config.type != "sgd":
        params["eps"] = config.eps
    if config.momentum_scale is not None:
        params["momentum_scale"] = config.momentum_scale
    return params


def state_bytes(optimizer: EmbeddingOptimizer, dim: int) -> int:
    """Returns the bytes of the state that an optimizer keeps for a row of ``dim`` columns."""
    params = without_scale({"optimizer": FUSED_OPTIMIZERS[optimizer]})
    assert params is not None
    return OPTIMIZERS[params["optimizer"]].state_bytes(dim)
