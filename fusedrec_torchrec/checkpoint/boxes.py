"""Finds out whether the chunks of a tensor overlap.

A tensor is read chunk by chunk, and elements are counted to see whether all were there.  That
count means something only if no element is in two chunks.
"""

from collections.abc import Sequence

__all__ = ["overlapping"]

MOST_CUTS = 32  # one within the other; a grid of shards needs as many as it has dimensions
MOST_PAIRS = 2000  # boxes that are compared each with each other
Box = tuple[Sequence[int], Sequence[int]]  # offsets, sizes


def overlapping(boxes: Sequence[Box]) -> str | None:
    """Returns which boxes overlap, in words; None if none do.

    Boxes are cut apart along the planes that go through none of them, first across one dimension,
    then across the next.  Every sharding can be cut apart like that; what cannot is compared
    box by box, and refused if there are too many for it.
    """
    full = [box for box in boxes if all(box[1])]
    pending = [(full, 0)]
    while pending:
        remaining, cuts = pending.pop()
        if len(remaining) < 2:
            continue
        separate = _cut_apart(remaining) if cuts < MOST_CUTS else [remaining]
        if len(separate) > 1:
            pending += [(some_boxes, cuts + 1) for some_boxes in separate]
        elif len(remaining) > MOST_PAIRS:
            return f"{len(remaining)} chunks lie across each other"
        elif (pair := _overlapping_pair(remaining)) is not None:
            first, second = pair
            return (
                f"chunks of sizes {list(first[1])} at {list(first[0])} and of sizes "
                f"{list(second[1])} at {list(second[0])} overlap"
            )
    return None


def _cut_apart(boxes: list[Box]) -> list[list[Box]]:
    """Divides boxes by planes across one dimension that go through none of them."""
    for dimension in range(len(boxes[0][0])):
        ordered = sorted(boxes, key=lambda box: box[0][dimension])
        separate: list[list[Box]] = []
        end = -1
        for box in ordered:
            begin = box[0][dimension]
            if begin >= end:
                separate.append([])
            separate[-1].append(box)
            end = max(end, begin + box[1][dimension])
        if len(separate) > 1:
            return separate
    return [boxes]


def _overlapping_pair(boxes: list[Box]) -> tuple[Box, Box] | None:
    for place, first in enumerate(boxes):
        for second in boxes[place + 1 :]:
            if all(
                a < b + size_b and b < a + size_a
                for a, size_a, b, size_b in zip(*first, *second, strict=True)
            ):
                return first, second
    return None
