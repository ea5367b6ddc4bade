"""A configured optimizer of tables in FBGEMM's terms."""

from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType

from fusedrec_torchrec.compat.momentum_scale import MomentumScaledRowWiseAdagrad
from fusedrec_torchrec.sharding.optimizer_config import EmbeddingOptimizerConfig

__all__ = ["fused_params"]

FUSED_OPTIMIZERS: dict[str, Any] = {
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
