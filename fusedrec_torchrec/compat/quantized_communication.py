"""What FBGEMM's codecs of TorchRec's qcomm registries are set to."""

from typing import Any

__all__ = ["loss_scale_of", "precision_of"]


def precision_of(codec: Any) -> Any:
    """Returns FBGEMM's precision of a codec, an enum's member; None if it is another kind."""
    return getattr(codec, "_comm_precision", None)


def loss_scale_of(codec: Any) -> float | None:
    """Returns what an FBGEMM codec multiplies numbers with before it rounds them."""
    scale: float | None = codec._loss_scale
    return scale
