"""How rows and gradients travel: as they are, in fewer bits, or only their largest entries."""

from fusedrec_torchrec.exchange.codecs.codec import Codec, Entries
from fusedrec_torchrec.exchange.codecs.options import CodecOptions, Codecs

__all__ = ["Codec", "CodecOptions", "Codecs", "Entries"]
