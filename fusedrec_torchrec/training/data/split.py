"""Which samples are trained on, and which are held out for evaluation."""

from fusedrec_torchrec.access.samples import Source

__all__ = ["split"]


def split(source: Source, held_out: float) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns first sample and number of samples to train on, and of those held out.

    Args:
        source: the data.
        held_out: share of the samples, where the data itself does not say which ones.
    """
    if source.held_out is not None:
        train = source.samples - source.held_out
    else:
        train = source.samples - round(source.samples * held_out)
    return (0, train), (train, source.samples - train)
