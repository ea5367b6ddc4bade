"""Makes numbers of 64 bits of texts: the values that vocabularies are made of.

Equal texts have equal keys, on every machine and in every release.  Different ones may share a key
by chance: among a hundred million values, the chance that any two do is 1 in 3700.
"""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fusedrec_torchrec.access.synthetic import random_bits

__all__ = ["keys_of"]

WORD = 8  # bytes of a text that are mixed in at a time
LENGTHS, WORDS = 1, 2  # streams of random bits


def keys_of(texts: pa.LargeBinaryArray) -> NDArray[np.uint64]:
    """Returns the key of each text; that of a null means nothing."""
    n = len(texts)
    _, offsets_of_bytes, content = texts.buffers()
    if n == 0 or offsets_of_bytes is None:
        return np.zeros(n, dtype=np.uint64)
    offsets = np.frombuffer(offsets_of_bytes, dtype=np.int64)[texts.offset : texts.offset + n + 1]
    is_empty = content is None or content.size == 0
    data = np.zeros(1, np.uint8) if is_empty else np.frombuffer(content, dtype=np.uint8)
    starts, lengths = offsets[:-1], np.diff(offsets)
    keys = random_bits(0, LENGTHS, lengths)
    longer, done = np.arange(n), 0
    while len(longer := longer[lengths[longer] > done]):
        places = done + np.arange(WORD)
        inside = places < lengths[longer, None]
        at = np.minimum(starts[longer, None] + places, len(data) - 1)
        words = np.where(inside, data[at], 0).astype(np.uint8).view("<u8")[:, 0]
        keys[longer] = random_bits(0, WORDS, keys[longer] ^ words)
        done += WORD
    return keys
