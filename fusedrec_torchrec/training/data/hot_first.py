"""Forms hot and cold batches as the data comes."""

from dataclasses import dataclass

from fusedrec_torchrec.access.hot_set import HotSet
from fusedrec_torchrec.access.samples import Source
from fusedrec_torchrec.training.data.alternation import Rates

__all__ = ["HotFirst"]

SHARE_SAMPLES = 1 << 16


@dataclass(frozen=True)
class HotFirst:
    """Forms FAE's hot and cold batches as the data comes.

    Every lane brings the hot samples of a chunk to its front.  So the chunk's first batches are hot
    in all lanes, on all ranks, and nobody needs to know more: a batch that turns out to have cold
    samples is exchanged like any other.  Every sample is still in the chunk it would be in.

    Attributes:
        hot_set: what is hot.
        rates: how hot and cold batches alternate.
    """

    hot_set: HotSet
    rates: Rates

    def share(self, source: Source, span: tuple[int, int]) -> float:
        """Returns the share of hot samples in a span of the source, estimated from its first ones.

        Args:
            source: the samples.
            span: first sample and number of samples.
        """
        samples = source.read(span[0], span[0] + min(span[1], SHARE_SAMPLES))
        return float(self.hot_set.hot_samples(samples, source.features.values()).mean())
