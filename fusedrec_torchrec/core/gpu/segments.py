"""How ids are put in order by row: sizes that kernels, their callers and ``traffic`` agree on.

Every row has a segment, room for its ids.  The segments of rows with a few ids lie one after
another, in any order; those of rows with more begin behind the place where these would end if there
were no others, and consist of whole pieces.
"""

__all__ = ["FEW", "MOST_IDS", "PIECE", "check_ids", "most_pieces", "places_for"]

FEW = 32  # ids of a row whose gradients one program sums up
PIECE = 64  # ids at a time of rows that have more

# Places in segments are int32, and so are those of the hash table, which are fewer: the segments of
# so many ids do not reach further.
MOST_IDS = (2**31 - 1) * (FEW + 1) // (2 * (FEW + 1) + PIECE)


def check_ids(ids: int) -> None:
    """Refuses more ids than kernels can count: of a batch that all ranks would have refused."""
    assert ids <= MOST_IDS, f"there are {ids} ids on this rank, must be at most {MOST_IDS}"


def most_pieces(ids: int) -> int:
    """Returns how many pieces the rows with more than a few of so many ids can have."""
    return ids // PIECE + ids // (FEW + 1)


def places_for(ids: int) -> int:
    """Returns how many places the hash table for so many ids has."""
    return max(2 * ids, 64)
