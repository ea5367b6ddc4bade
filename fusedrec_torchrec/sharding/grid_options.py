"""What a user can choose about 2D parallelism."""

from typing import Literal

from pydantic import Field

from fusedrec_torchrec.codecs.options import CodecOptions
from fusedrec_torchrec.core.config import section

__all__ = ["GridOptions", "GridSync"]

GridSync = Literal["weights", "gradients"]
Rows = Literal["touched", "all"]
Overlap = Literal["none", "until_lookup", "one_step"]
Layout = Literal["replicas_adjacent", "groups_adjacent"]


@section
class GridOptions:
    """Describes groups of model parallelism, which are replicas of each other.

    Attributes:
        sharding_group_size: ranks of a group, over which the tables are sharded; the number of
            ranks must be a multiple of it.
        sync_every: calls of ``sync`` (training steps) from one sync to the next.
        sync: what replicas exchange.  ``weights``: every group trains alone, and at a sync the rows
            become their average over the groups.  ``gradients``: the gradients of every step are
            summed over the groups before one update, which is training without groups.
        rows: of ``weights``.  ``touched``: rows that some group has used since the last sync;
            ``all``: whole shards, as TorchRec's ``DMPCollection`` does.
        sync_optimizer_state: of ``weights``: whether the optimizer's state is averaged, too.  If
            not, a checkpoint has the first group's.
        overlap: of ``weights``.  ``none``: ``sync`` returns when it is done.  ``until_lookup``:
            rows travel until the tables are used again.  ``one_step``: they travel during the
            whole next step; its updates are kept, on top of an average that is one step old.
        codec: of ``gradients``: how they travel between groups; what a codec takes from them is
            kept, in memory of the size of the tables, and added to the row's next gradient.  None:
            as they are.
        layout: ``replicas_adjacent``: the replicas of a shard are on consecutive ranks, which
            should be on one host; ``groups_adjacent``: the ranks of a group are.
    """

    sharding_group_size: int = Field(ge=1, strict=True)
    sync_every: int = Field(default=1, ge=1, strict=True)
    sync: GridSync = "weights"
    rows: Rows = "touched"
    sync_optimizer_state: bool = True
    overlap: Overlap = "none"
    codec: CodecOptions | None = None
    layout: Layout = "replicas_adjacent"

    def __post_init__(self) -> None:
        if self.rows == "all" and self.overlap == "one_step":
            raise ValueError("overlap is 'one_step' with rows 'all', must be with rows 'touched'")
        if self.sync == "weights" and self.codec is not None:
            raise ValueError(
                f"codec is {self.codec.type} with sync 'weights', must be with sync 'gradients': "
                "there is nothing to add what is left of a row to"
            )
        if self.sync == "gradients":
            given = {
                "sync_every": self.sync_every != 1,
                "rows": self.rows != "touched",
                "sync_optimizer_state": not self.sync_optimizer_state,
                "overlap": self.overlap != "none",
            }
            for name, is_given in given.items():
                if is_given:
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r} with sync 'gradients', which happens "
                        "in every step; it is a setting of sync 'weights'"
                    )

    def ranks_per_host(self, ranks: int, local_ranks: int) -> int:
        """Returns how many ranks of a group are on one host.

        Args:
            ranks: of all groups.
            local_ranks: of them, on one host.
        """
        size = self.sharding_group_size
        if self.layout == "groups_adjacent":
            return min(local_ranks, size)
        return max(local_ranks * size // ranks, 1)

    def groups(self, ranks: int) -> int:
        """Returns the number of groups.

        Raises:
            ValueError: the ranks cannot be divided so.
        """
        size = self.sharding_group_size
        allowed = [n for n in range(1, ranks) if ranks % n == 0]
        if size not in allowed:
            raise ValueError(
                f"sharding_group_size is {size} with {ranks} ranks, must be one of {allowed}, "
                "so that there are at least two groups of the same size; with one group use "
                "DistributedModelParallel"
                if allowed
                else f"sharding_group_size is {size} with {ranks} rank, there must be at least two "
                "groups, so at least two ranks"
            )
        return ranks // size
