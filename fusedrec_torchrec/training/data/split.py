"""Which samples are trained on, and which are held out for evaluation."""

from fusedrec_torchrec.access.samples import Source

__all__ = ["split"]


def split(source: Source, held_out: float) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns first sample and number of samples to train on, and of those held out."""
    train = source.samples - round(source.samples * held_out)
    return (0, train), (train, source.samples - train)
