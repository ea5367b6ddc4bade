"""Errors that reach every rank: all ranks know that one failed, now they learn why."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["MESSAGE_BYTES", "raise_on_all_ranks"]

MESSAGE_BYTES = 2048


def raise_on_all_ranks(
    pg: dist.ProcessGroup,
    failed_ranks: Sequence[int],
    own_message: str | None,
    device: torch.device,
) -> None:
    """Raises the same ``ValueError`` on every rank of the group.

    A collective: every rank must come here in the same step, which the status words of the
    input dist make sure of.  The text is that of the lowest failed rank.

    Args:
        pg: the process group.
        failed_ranks: ranks of the group whose input was bad; the same list on every rank.
        own_message: this rank's message if it is among them.
        device: where collectives run.
    """
    first = failed_ranks[0]
    text = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device)
    if pg.rank() == first:
        assert own_message is not None
        encoded = own_message.encode()[:MESSAGE_BYTES]
        text[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device)
    dist.broadcast(text, src=dist.get_global_rank(pg, first), group=pg)
    message = bytes(text.cpu().tolist()).rstrip(b"\0").decode(errors="replace")
    others = ", ".join(str(rank) for rank in failed_ranks[1:])
    also = f" (bad input on ranks {others}, too)" if others else ""
    raise ValueError(f"bad input on rank {first}: {message}{also}")
