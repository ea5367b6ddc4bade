"""Texts to numbers: equal for equal texts, in whatever array they stand."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from fusedrec_torchrec.training.data.keys import keys_of

KNOWN = [
    9370218965779684112,
    831080573258475730,
    14603727031248742071,
    7763459180123707410,
]
TEXTS = st.lists(st.binary(max_size=40), max_size=60)


def keys(texts: list[bytes]) -> list[int]:
    return keys_of(pa.array(texts, pa.large_binary())).tolist()


@given(TEXTS)
def test_equal_texts_have_equal_keys_and_others_do_not(texts: list[bytes]) -> None:
    assert len(set(keys(texts))) == len(set(texts))
    assert keys(texts) == [keys([text])[0] for text in texts]


@given(TEXTS, st.integers(0, 10), st.integers(0, 50))
def test_slices_have_the_keys_of_their_texts(texts: list[bytes], start: int, length: int) -> None:
    array = pa.array(texts, pa.large_binary()).slice(start, length)
    assert keys_of(array).tolist() == keys(array.to_pylist())


def test_keys_stay_as_they_are_in_every_release() -> None:
    """Prepared data, and whoever looks up rows of a model by them, must find the same."""
    assert keys([b"", b"7", b"Drama", b"a longer text than eight bytes"]) == KNOWN


def test_ends_and_zeros_count() -> None:
    similar = [b"a", b"a\0", b"\0a", b"aaaaaaaa", b"aaaaaaaaa", b"aaaaaaaa\0", b"", b"\0"]
    assert len(set(keys(similar))) == len(similar)
