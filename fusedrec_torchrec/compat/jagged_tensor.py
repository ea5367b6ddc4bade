"""What TorchRec's KeyedJaggedTensor does not let others set."""

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["set_inverse_indices"]


def set_inverse_indices(
    features: KeyedJaggedTensor, inverse_indices: tuple[list[str], torch.Tensor]
) -> None:
    """Gives a batch its inverse indices back, which ``permute`` has dropped.

    HACK: there is no other way to set them but to make the batch anew, with all its caches.
    """
    features._inverse_indices = inverse_indices
